"""The .npz of an FID job: arr_0 (N, H, W, 3) uint8, uncompressed, as the FID evaluators read it.

.job/npz.json records its bytes: a digest of the pixels, taken while they were written, and of the bytes before and
after them. A later start reads the archive at the speed of the disk and compares.
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from accel.errors import Stopped
from accel.fid.folder import npz_of, picture_name, read_picture
from accel.files import atomic_write, open_regular, read_json, sync_folder

READERS = 4  # threads that decode PNGs, or read and hash pixels
MEMBER = "arr_0.npy"
RUN = 8  # pictures that are hashed at a time; the record relies on it


class Archive:
    """The archive of pictures 0 … count - 1 of `folder`, each (size, size, 3)."""

    def __init__(self, folder: Path, count: int, size: int):
        self.path, self.folder, self.count, self.size = npz_of(folder), folder, count, size
        self.record = folder / ".job" / "npz.json"

    def problem(self) -> str | None:
        """Why the file is not the archive as it was written, or None. Reads all of it."""
        try:
            record = read_json(self.record)
            with open_regular(self.path) as file:
                start = record["start"]
                whole = record == self._recorded(file, start, self._hash_runs(file, start))
        except FileNotFoundError as error:
            return "has no record of its contents" if error.filename == str(self.record) else "is missing"
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            return f"or its record is damaged ({error})"
        return None if whole else "is not as it was written"

    def forget(self) -> None:
        """Remove the record: the archive will be written again."""
        self.record.unlink(missing_ok=True)
        sync_folder(self.record.parent)

    def write(self, stopping: Callable[[], bool]) -> None:
        """Write the archive, few pictures in memory at a time.

        Raises UsageError for a file that is not a whole picture, Stopped when `stopping()` says so.
        """
        hashes = []
        with atomic_write(self.path, mode="w+b", durable=True) as file:
            with (
                zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,
                archive.open(MEMBER, "w", force_zip64=True) as member,
                ThreadPoolExecutor(READERS) as pool,
            ):
                shape = self.count, self.size, self.size, 3
                np.lib.format.write_array_header_1_0(member, dict(descr="|u1", fortran_order=False, shape=shape))
                start = file.tell()
                for first in range(0, self.count, RUN):
                    pixels = b"".join(pool.map(self._read, range(first, min(first + RUN, self.count))))
                    hashes.append(hashlib.sha256(pixels).digest())
                    member.write(pixels)
                    if stopping():
                        raise Stopped(f"stopped while writing {self.path}; start again with the same command")
            file.flush()
            with atomic_write(self.record, "w", durable=True, through_link=False) as out:
                json.dump(self._recorded(file, start, hashes), out)
        sync_folder(self.path.parent)

    def _read(self, number):
        return read_picture(self.folder / picture_name(number), self.size).tobytes()

    def _recorded(self, file, start, hashes):
        """The record of an open archive whose pixels begin at `start` and have these hashes."""
        end = start + self.count * self.size**2 * 3
        ends = os.pread(file.fileno(), min(start, 2**16), 0), os.pread(file.fileno(), 2**16, end)
        return {"start": start, "sha256": hashlib.sha256(b"".join([*hashes, *ends])).hexdigest()}

    def _hash_runs(self, file, start):
        """SHA-256 of the pixels of every RUN pictures, read by several threads."""
        each = self.size**2 * 3

        def of_run(first):
            pixels = os.pread(file.fileno(), min(RUN, self.count - first) * each, start + first * each)
            return hashlib.sha256(pixels).digest()

        with ThreadPoolExecutor(READERS) as pool:
            return list(pool.map(of_run, range(0, self.count, RUN)))
