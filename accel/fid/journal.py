"""The record of finished batches: what an FID job resumes from.

A picture gets its name, and a batch its line, when the bytes are on disk. A batch is finished when its line is there. A
job that is started again makes the others, each from the random state recorded before it. So the folder ends with the
same bits, however often the job was interrupted.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from accel.errors import UsageError
from accel.fid.folder import CODE, Batches, npz_of, picture_name, write_picture
from accel.files import atomic_write, sync_folder

WRITERS = 4  # threads that compress PNGs: a 512 px picture takes one of them 60 ms


class Journal:
    """One file a rank, one JSON line a batch, each line on disk before the next is begun.

    A line holds the batch, its pictures' digests, the generator's state after it (upstream's noise), and a check over
    these and the settings: a line that is damaged, or another job's, is seen.
    """

    def __init__(self, folder: Path, batches: Batches):
        self.folder, self.batches, self.home = folder, batches, folder / ".job"
        self.settings, self.path = self.home / "settings.json", self._path(batches.rank)
        self.states = {}  # after each recorded batch: the generator's state (hexadecimal) or None

    def _path(self, rank):
        return self.home / f"rank-{rank:04d}.jsonl"

    def begin(self, settings: dict) -> None:
        """Open the folder for a job with `settings`, on one rank. UsageError if its pictures were made otherwise."""
        npz = npz_of(self.folder)
        if npz.exists() or any(path.is_file() for path in self.folder.glob("*.png")):
            self._compare(settings)
        else:
            with atomic_write(self.settings, "w", durable=True) as file:
                json.dump(settings, file, indent=2)
            for folder in (self.home, self.folder, self.folder.parent):
                sync_folder(folder)
        for partial in (*self.folder.glob(".[0-9]*.png.*.part"), *npz.parent.glob(f".{npz.name[:200]}.*.part")):
            partial.unlink()  # of a killed process

    def _compare(self, settings):
        try:
            earlier = dict(json.loads(self.settings.read_text()))
        except (OSError, ValueError, TypeError):
            raise UsageError(
                f"--sample-dir: {self.folder} holds pictures, or its .npz is there, without a record of how they were "
                f"made ({self.settings} is missing or damaged); move them, or use another --sample-dir"
            ) from None
        changed = [name for name in {**settings, **earlier} if earlier.get(name) != settings.get(name)]
        if CODE in changed:
            changed.remove(CODE)
            print(f"{self.folder}: was begun by other kernels; pictures from here on may differ in their last bits")
        if changed:
            now, then = (each.get(changed[0], "off") for each in (settings, earlier))  # --forecast is there only if on
            raise UsageError(
                f"{changed[0]} {now}: the pictures in {self.folder} were begun with {then}; "
                "use that, or another --sample-dir"
            )

    def read(self) -> set[int]:
        """Read the record: the finished batches. A torn last line, and a batch that lacks a picture, do not count."""
        for record in self._records(self.home.glob("rank-*.jsonl") if self.batches.independent else [self.path]):
            self.states[record["batch"]] = record.get("generator")
        if self.path.exists():
            os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)
        there, numbers = {entry.name for entry in os.scandir(self.folder)}, self.batches.pictures
        return {batch for batch in self.states if all(picture_name(number) in there for number in numbers(batch))}

    def digests(self) -> dict[int, set[str]]:
        """Of each picture, the digests that its file may have: every one recorded, since it may be made again."""
        found, ranks = {}, map(self._path, range(self.batches.world))
        # By name too: a network file system may list the folder as it was half a minute ago.
        for record in self._records({*ranks, *self.home.glob("rank-*.jsonl")}):
            for number, digest in zip(self.batches.pictures(record["batch"]), record["sha256"], strict=True):
                found.setdefault(number, set()).add(digest)
        return found

    def _records(self, paths):
        """The lines of these files. UsageError for one that is damaged or not of this job."""
        for path in (path for path in paths if path.exists()):
            lines = path.read_bytes().split(b"\n")
            for number, line in enumerate(lines[:-1], start=1):  # what follows the last \n is torn
                try:
                    record = json.loads(line)
                    good = record.pop("check") == self._check(record)
                except (ValueError, TypeError, KeyError, AttributeError):
                    good = False
                if not good:
                    raise UsageError(
                        f"--sample-dir: {path}, line {number}: is damaged or another job's; restore the file, or "
                        "delete it and start again: its pictures are made anew"
                    )
                yield record

    def _check(self, record):
        return hashlib.sha256(self.settings.read_bytes() + json.dumps(record).encode()).hexdigest()[:16]

    def write(self, batch: int, pixels: np.ndarray, state: str | None) -> None:
        """Write and record a batch: pixels (n, H, W, 3) uint8; state: the generator after it, where that matters."""
        paths = [self.folder / picture_name(number) for number in self.batches.pictures(batch)]
        with ThreadPoolExecutor(WRITERS) as pool:
            record = {"batch": batch, "sha256": list(pool.map(write_picture, paths, pixels))}
        if state is not None:
            record["generator"] = state
        sync_folder(self.folder)  # the pictures' names before the line
        with open(self.path, "a") as file:
            file.write(json.dumps({**record, "check": self._check(record)}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.home)
        self.states[batch] = state
