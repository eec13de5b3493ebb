"""The .npz of an FID job: arr_0 (N, H, W, 3) uint8, uncompressed, as the FID evaluators read it."""

import zipfile
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np

from accel.errors import Stopped
from accel.fid.folder import picture_name, read_picture
from accel.files import atomic_write, sync_folder

READERS = 4  # threads that decode PNGs
MEMBER = "arr_0.npy"


def problem(path: Path, count: int, size: int) -> str | None:
    """Why `path` is not the whole archive of `count` pictures of `size` px, or None. Reads its headers only."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(MEMBER) as member:
            np.lib.format.read_magic(member)
            header = np.lib.format.read_array_header_1_0(member)
            pixels = archive.getinfo(MEMBER).file_size - member.tell()
    except Exception as error:  # damaged bytes raise whatever they happen to mean
        return f"is damaged ({error})"
    expected = (count, size, size, 3), False, np.dtype(np.uint8)
    return None if header == expected and pixels == count * size * size * 3 else "holds another array"


def write(
    path: Path, folder: Path, digests: dict[int, Collection[str]], count: int, size: int, stopping: Callable[[], bool]
) -> None:
    """Write pictures 0 … count - 1 of `folder`, each (size, size, 3), few of them in memory at a time.

    digests: those that each picture's file may have. Raises UsageError for a file with another, Stopped when
    `stopping()` says so.
    """
    with (
        atomic_write(path, durable=True) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,
        archive.open(MEMBER, "w", force_zip64=True) as member,
    ):
        header = dict(descr="|u1", fortran_order=False, shape=(count, size, size, 3))
        np.lib.format.write_array_header_1_0(member, header)
        for pixels in _pictures(folder, digests, count):
            member.write(pixels.tobytes())
            if stopping():
                raise Stopped(f"stopped while writing {path}; start again with the same command")
    sync_folder(path.parent)


def _pictures(folder, digests, count) -> Iterator[np.ndarray]:
    """Pixels of pictures 0 … count - 1, read some way ahead."""
    numbers = iter(range(count))
    with ThreadPoolExecutor(READERS) as pool:
        reading = (pool.submit(read_picture, folder / picture_name(number), digests[number]) for number in numbers)
        ahead = deque(islice(reading, 8 * READERS))
        while ahead:
            yield ahead.popleft().result()
            ahead.extend(islice(reading, 1))
