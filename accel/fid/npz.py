"""The .npz of an FID job: arr_0 (N, H, W, 3) uint8, uncompressed, as the FID evaluators
read it.

.job/npz.json records its SHA-256. A later start reads the archive at the speed of the
disk and compares.
"""

import json
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from accel.errors import Stopped
from accel.fid.folder import npz_of, picture_name, read_picture
from accel.files import atomic_write, open_regular, read_json, sha256_of, sync_folder

READERS = 4  # threads that decode PNGs
RUN = 8  # pictures in memory


class Archive:
    """The archive of pictures 0 … count - 1 of `folder`, each (size, size, 3)."""

    def __init__(self, folder: Path, count: int, size: int):
        self.path = npz_of(folder)
        self.folder = folder
        self.count = count
        self.size = size
        self.record = folder / ".job" / "npz.json"

    def problem(self) -> str | None:
        """Read the existing archive and compare it with its record. Return what is wrong, or
        None.
        """
        try:
            record = read_json(self.record)
            with open_regular(self.path) as file:
                intact = record == {"sha256": sha256_of(file)}
        except FileNotFoundError:
            return "has no record of its contents"
        except (OSError, ValueError) as error:
            return f"cannot be read, or its record is damaged ({error})"
        return None if intact else "is not as it was written"

    def forget(self) -> None:
        """Remove the record: the archive will be written again."""
        self.record.unlink(missing_ok=True)
        sync_folder(self.record.parent)

    def complete(self, stopping: Callable[[], bool]) -> None:
        """Write the archive, unless it is there as it was written. Raises as `write`."""
        if self.path.exists():
            problem = self.problem()
            if problem is None:
                return
            print(f"{self.path}: {problem}; writing it again")
        self.write(stopping)

    def write(self, stopping: Callable[[], bool]) -> None:
        """Write the archive, few pictures in memory at a time.

        Raises UsageError for a file that is not a whole picture, Stopped when
        `stopping()` says so.
        """
        with atomic_write(self.path, mode="w+b", durable=True) as file:
            with (
                zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,
                archive.open("arr_0.npy", "w", force_zip64=True) as member,
                ThreadPoolExecutor(READERS) as pool,
            ):
                shape = self.count, self.size, self.size, 3
                np.lib.format.write_array_header_1_0(
                    member, dict(descr="|u1", fortran_order=False, shape=shape)
                )
                for first in range(0, self.count, RUN):
                    for pixels in pool.map(self._read, range(first, min(first + RUN, self.count))):
                        member.write(pixels)
                    if stopping():
                        raise Stopped(
                            f"stopped while writing {self.path}; start again with the same command"
                        )
            record = {"sha256": sha256_of(file)}
            with atomic_write(self.record, "w", durable=True, through_link=False) as out:
                json.dump(record, out)
        sync_folder(self.path.parent)

    def _read(self, number):
        return read_picture(self.folder / picture_name(number), self.size).tobytes()
