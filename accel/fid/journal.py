"""The record of finished batches: what an FID job resumes from.

A picture gets its name, and a batch its line, when the bytes are on disk. A batch is finished when its line is there. A
job that is started again makes the others, each from the random state recorded before it. So the folder ends with the
same bits, however often the job was interrupted.
"""

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accel.errors import UsageError
from accel.fid.folder import CODE, Batches, npz_of, picture_name, write_picture
from accel.files import atomic_write, open_regular, read_json, read_small, remove_partial_files, sync_folder

# Threads that compress PNGs: 16 ms a picture of 256 px, 60 ms of 512 px. Four keep up with twice what an H200 makes.
WRITERS = 4


class Record(NamedTuple):
    """What rank 0 reads of an earlier start, for all ranks.

    Each node has its own, older view of a network file system: ranks that read for themselves would disagree on what
    is left, and nobody would make what each takes for another's.
    """

    settings: bytes
    finished: set[int]  # batches
    states: dict[int, str | None]  # the generator's state after each recorded batch, where noise is a stream


class Journal:
    """One file a rank, one JSON line a batch, each line on disk before the next is begun.

    A line holds the batch, its pictures' digests, the generator's state after it (upstream's noise), and a check over
    these and the settings: a line that is damaged, or another job's, is seen.
    """

    def __init__(self, folder: Path, batches: Batches):
        self.folder, self.batches, self.home = folder, batches, folder / ".job"
        self.settings, self.path = self.home / "settings.json", self._path(batches.rank)
        self.record = None  # on every rank, after `resume`
        self.digests = {}  # of each picture that this rank read of or made, those that its file may have
        self.states = {}

    def _path(self, rank):
        return self.home / f"rank-{rank:04d}.jsonl"

    def begin(self, settings: dict) -> None:
        """Open the folder for a job with `settings`, on one rank. UsageError if its pictures were made otherwise."""
        npz = npz_of(self.folder)
        if npz.exists() or any(entry.name.endswith(".png") and entry.is_file() for entry in os.scandir(self.folder)):
            self._compare(settings)
        else:
            with atomic_write(self.settings, "w", durable=True, through_link=False) as file:
                json.dump(settings, file, indent=2)
            for folder in (self.home, self.folder, self.folder.parent):
                sync_folder(folder)
        remove_partial_files(self.folder, r"\d+\.png")
        remove_partial_files(npz.parent, re.escape(npz.name[:200]))
        remove_partial_files(self.home, ".*")

    def _compare(self, settings):
        try:
            earlier = read_json(self.settings)
        except (OSError, ValueError):
            raise UsageError(
                f"`sample_dir`: {self.folder} holds pictures, or its .npz is there, without a record of how they were "
                f"made ({self.settings} is missing or damaged); move them, or use another `sample_dir`"
            ) from None
        changed = [name for name in {**settings, **earlier} if earlier.get(name) != settings.get(name)]
        if CODE in changed:
            changed.remove(CODE)
            print(f"{self.folder}: was begun by other kernels; pictures from here on may differ in their last bits")
        if changed:
            name = changed[0]  # "off": --forecast is a setting only where it is on
            raise UsageError(
                f"{name} {settings.get(name, 'off')}: the pictures in {self.folder} were begun with "
                f"{earlier.get(name, 'off')}; use that, or another `sample_dir`"
            )

    def read(self) -> Record:
        """Read the record, on one rank. A torn last line, and a batch that lacks a picture, do not count."""
        states, settings = {}, read_small(self.settings)
        # By name too: a network file system may list the folder as it was half a minute ago.
        for path in sorted({*map(self._path, range(self.batches.world)), *self.home.glob("rank-*.jsonl")}):
            for line in self._lines(path, settings):
                states[line["batch"]] = line.get("generator")
                self._note(line)
        there = {entry.name for entry in os.scandir(self.folder)}
        whole = {batch for batch in states if there.issuperset(map(picture_name, self.batches.pictures(batch)))}
        return Record(settings, whole, states)

    def _lines(self, path, settings):
        """The lines of a file. UsageError for one that is damaged or not of this job."""
        if not path.exists():
            return
        with open_regular(path, os.O_RDONLY | os.O_NOFOLLOW) as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):  # torn
                    return
                try:
                    record = json.loads(line)
                    good = record.pop("check") == _check(settings, record)
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                    good = False
                if not good:
                    raise UsageError(
                        f"`sample_dir`: {path}, line {number}: is damaged or another job's; restore the file, or "
                        "delete it and start again: its pictures are made anew"
                    )
                yield record

    def _note(self, line):
        for number, digest in zip(self.batches.pictures(line["batch"]), line["sha256"], strict=True):
            self.digests.setdefault(number, set()).add(digest)

    def resume(self, record: Record) -> None:
        """Take rank 0's word for what was recorded, and cut a torn last line off this rank's file."""
        self.record, self.states = record, dict(record.states)
        with suppress(FileNotFoundError), open_regular(self.path, os.O_RDWR | os.O_NOFOLLOW) as file:
            file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))

    def write(self, batch: int, pixels: np.ndarray, state: str | None) -> None:
        """Write and record a batch: pixels (n, H, W, 3) uint8; state: the generator after it, where that matters."""
        paths = [self.folder / picture_name(number) for number in self.batches.pictures(batch)]
        with ThreadPoolExecutor(WRITERS) as pool:
            record = {"batch": batch, "sha256": list(pool.map(write_picture, paths, pixels))}
        if state is not None:
            record["generator"] = state
        sync_folder(self.folder)  # the pictures' names before the line
        with open_regular(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW) as file:
            line = json.dumps({**record, "check": _check(self.record.settings, record)})
            file.write(f"{line}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.home)
        self.states[batch] = state
        self._note(record)


def _check(settings, record):
    return hashlib.sha256(settings + json.dumps(record).encode()).hexdigest()[:16]
