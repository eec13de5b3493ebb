"""The .npz of an FID job: arr_0 (N, H, W, 3) uint8, uncompressed, for FID evaluators.

.job/npz.json records its SHA-256, by which a resumed job verifies an existing archive.
"""

import json
import logging
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import numpy as np

from accel.errors import Stopped
from accel.io import picture_files
from accel.io.filesystem import atomic_write, open_regular, read_json, sha256_of, sync_folder
from accel.jobs.fid.folder import npz_path, picture_name, read_picture

log = logging.getLogger(__name__)

RECORD = Path(".job", "npz.json")  # in the folder
READER_THREADS = 4  # decode PNGs
READ_AHEAD = 8  # pictures in memory


def problem(folder: Path) -> str | None:
    """Verify the archive of a folder against its record. Return a problem, or None."""
    try:
        record = read_json(folder / RECORD)
        with open_regular(npz_path(folder)) as file:
            intact = record == {"sha256": sha256_of(file)}
    except (OSError, ValueError):
        return "has no record of its contents, perhaps because pictures were added"
    return None if intact else "was changed since it was written"


def write(folder: Path, count: int, size: int, stopping: Callable[[], bool]) -> None:
    """Write the archive of pictures 0 … count − 1 of `folder`, each (size, size, 3), a few at a
    time, unless it exists and is intact. Raises UsageError for an incomplete picture, Stopped if
    `stopping()` becomes true.
    """
    path = npz_path(folder)
    if path.exists():
        reason = problem(folder)
        if reason is None:
            return
        log.warning(f"{path}: {reason}; writing it again")
    with atomic_write(path, mode="w+b", durable=True) as file:
        _write_pictures(file, folder, count, size, stopping)
        record = {"sha256": sha256_of(file)}
        with atomic_write(folder / RECORD, "w", durable=True, through_link=False) as out:
            json.dump(record, out)
    sync_folder(path.parent)


def _write_pictures(file, folder, count, size, stopping):
    """Stream pictures 0 … count − 1 of `folder`, each (size, size, 3), into an open .npz file."""
    shape = count, size, size, 3
    with (
        zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,
        archive.open("arr_0.npy", "w", force_zip64=True) as member,
        ThreadPoolExecutor(READER_THREADS) as pool,
    ):
        np.lib.format.write_array_header_1_0(
            member, dict(descr="|u1", fortran_order=False, shape=shape)
        )
        for first in range(0, count, READ_AHEAD):
            numbers = range(first, min(first + READ_AHEAD, count))
            files = [folder / picture_name(number) for number in numbers]
            for pixels in pool.map(read_picture, files, repeat(size)):
                member.write(pixels)
            if stopping():
                raise Stopped(
                    f"stopped while writing {npz_path(folder)}; start again with the same command"
                )


def create_npz(folder: Path, count: int) -> Path:
    """Write the archive of pictures 0 … count − 1 of any folder and return its path.

    No record is written, so a job resumed in this folder writes its archive again. Raises
    UsageError for a picture that is missing, corrupt, not square or unlike the first in size.
    """
    size = len(picture_files.read_picture(folder / picture_name(0)).pixels)
    path = npz_path(folder)
    with atomic_write(path, mode="w+b") as file:
        _write_pictures(file, folder, count, size, lambda: False)
    return path
