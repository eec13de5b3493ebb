"""The folder of an FID job: its plan, batches, lock, pictures and recorded settings.

A picture gets its name only when its bytes are on disk, so every named picture is complete.
"""

import fcntl
import io
import json
import logging
import os
import re
import socket
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from math import ceil
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from accel.errors import UsageError, path_errors, require_equal, shown
from accel.families import LabelOrder
from accel.io.filesystem import (
    atomic_write,
    read_json,
    read_small,
    remove_partial_files,
    require_writable,
    sync_folder,
    temporary_stem,
)

log = logging.getLogger(__name__)

KERNELS_SETTING = "this code's kernels"  # may change between interruption and resumption
COUNT_SETTING = "--num-fid-samples"  # may grow
# Flags that older versions recorded in addition to their effect, such as the contents of --ckpt.
# They are ignored in the record unless the current job records them too.
LEGACY_SETTINGS = {"--num-heads", "--weights-entry", "--balanced-labels"}
# Settings that may differ between the nodes of one job.
MACHINE_SETTINGS = {"device", "torch", "number of threads", KERNELS_SETTING}
# PNG compression takes 16 ms per picture of 256 px and 60 ms of 512 px. Four threads are twice as
# fast as an H200 samples.
WRITER_THREADS = 4
RELEASE_TIMEOUT_S = 2.0  # a killed process needs time to exit


class Plan(NamedTuple):
    """The pictures that an FID job samples."""

    folder: Path
    count: int  # type: ignore[assignment]  # pictures in the archive; upstream's order rounds up
    batch_size: int  # pictures per rank
    seed: int
    num_classes: int
    image_size: int
    latent: tuple[int, int, int]  # (C, L, L)
    # Rows of noise per picture and step in upstream's stream: 2 with guidance, else 1.
    drawn: int = 2
    labels: LabelOrder = "random"
    # Seed noise and labels per picture; else upstream's stream, with one seed per rank.
    independent: bool = False

    @property
    def batch_sizes(self) -> set[int]:
        """The distinct batch sizes; batches of upstream's order are never partial."""
        if not self.independent:
            return {self.batch_size}
        return {min(self.batch_size, self.count), self.count % self.batch_size} - {0}


class Batches:
    """The division of a plan's pictures into batches.

    Upstream's order: in each round, every rank samples one batch; numbers are interleaved by rank
    or, for "class_by_class", consecutive; the total is rounded up to whole rounds. Independent of
    the world size: a round is one batch of any rank, and the last batch may be partial.
    """

    def __init__(self, plan: Plan, rank: int, world: int):
        self.plan = plan
        self.rank = rank
        self.world = world
        self.in_round = 1 if plan.independent else world  # batches per round
        rounds = ceil(plan.count / (self.in_round * plan.batch_size))
        self.count = self.in_round * rounds  # batches of all ranks
        self.total = plan.count if plan.independent else self.count * plan.batch_size

    def finished(self) -> set[int]:
        """Return the batches, of all ranks, whose pictures all exist."""
        files = {entry.name for entry in os.scandir(self.plan.folder) if entry.is_file()}
        return {
            batch
            for batch in range(self.count)
            if files.issuperset(map(picture_name, self.pictures(batch)))
        }

    def to_draw(self, finished: Collection[int]) -> list[int]:
        """Return the batches whose noise this rank draws, in order: its share of the unfinished
        batches; in upstream's stream also the finished batches in between.
        """
        if self.plan.independent:
            left = [batch for batch in range(self.count) if batch not in finished]
            return left[self.rank :: self.world]
        batches = range(self.rank, self.count, self.world)
        last = max((batch for batch in batches if batch not in finished), default=-1)
        return [batch for batch in batches if batch <= last]

    def pictures(self, batch: int) -> range:
        """Return the picture numbers of a batch. In upstream's order, batch i·world + rank is the
        i-th batch of that rank.
        """
        step = 1 if self.plan.labels == "class_by_class" else self.in_round
        index, offset = divmod(batch, step)
        size = step * self.plan.batch_size
        first = index * size
        return range(first + offset, min(first + size, self.total), step)

    def first_of_rank(self, batch: int) -> int:
        """Return the index of the batch's first picture if all pictures were ordered by rank."""
        index, offset = divmod(batch, self.in_round)
        return (offset * (self.count // self.in_round) + index) * self.plan.batch_size


def npz_path(folder: Path) -> Path:
    """Return the path of a folder's archive."""
    return folder.with_name(f"{folder.name}.npz")


def picture_name(number: int) -> str:
    """Return the file name of a picture."""
    return f"{number:06d}.png"


def write_pictures(folder: Path, numbers: range, pixels: np.ndarray) -> None:
    """Write pixels (n, H, W, 3) uint8 as PNGs, durably. Existing pictures are kept."""

    def write(number, picture):
        path = folder / picture_name(number)
        if path.is_file():
            return
        with atomic_write(path, durable=True, through_link=False) as file:
            Image.fromarray(picture).save(file, format="PNG")

    with ThreadPoolExecutor(WRITER_THREADS) as pool:
        list(pool.map(write, numbers, pixels))
    sync_folder(folder)


def read_picture(path: Path, size: int) -> np.ndarray:
    """Read a complete PNG as (size, size, 3) uint8. Raises UsageError for any other file. Twice as
    fast as accel.io.picture_files, which also checks colours.
    """
    try:
        content = read_small(path, 2**28)
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            image.verify()  # checksums, which decoding ignores
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if (image.size, image.mode) == ((size, size), "RGB"):
                return np.asarray(image)
    # SyntaxError: a corrupt chunk
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        pass
    raise UsageError(
        f"{path}: is not a complete PNG of {size}×{size} pixels; delete it and start again the job "
        "that made it"
    )


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Create the folder and lock it with flock, which the kernel releases when the process ends.
    Raises UsageError that names the running job if it is locked, and one if the folder is not
    readable and writable, before weights are loaded.

    On a file system without flock, a notice is printed.
    """
    path = folder / ".job" / "lock"
    with ExitStack() as stack:
        with path_errors("sample_dir", folder, "free some space, or use another"):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered, so that a full disk fails here and not in close().
            file = stack.enter_context(path.open("a+b", buffering=0))
            _lock(folder, file)
            file.truncate(0)
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}".encode())
        remedy = "give yourself the right to write there and list it, or use another"
        for changed in (folder, path.parent, folder.parent):
            with path_errors("sample_dir", changed, remedy):
                require_writable(changed)
                os.listdir(changed)
        with path_errors("sample_dir", npz_path(folder)), suppress(FileNotFoundError):
            os.lstat(npz_path(folder))  # fails for a name that is too long
        yield


def _lock(folder, file):
    """Lock an open file. Raises UsageError if another process has the lock."""
    deadline = time.monotonic() + RELEASE_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.seek(0)
                holder = shown(file.read().decode())
                raise UsageError(
                    f"{folder} is in use by another job ({holder})",
                    "wait for it, or use another",
                    parameter="sample_dir",
                ) from None
        except OSError as error:
            log.warning(
                f"{folder}: this file system has no locks ({error.strerror}); start one job at a "
                "time here"
            )
            return None
        time.sleep(0.05)


def open_folder(folder: Path, settings: dict, can_grow: bool = False) -> bool:
    """Record `settings` in a new folder, or compare them with the record; remove partial files of
    killed jobs. settings: all that affects the pictures' bits, plain JSON, by flag. can_grow: the
    job may increase the number of pictures. Return whether it does. Raises UsageError if the
    settings differ.
    """
    job_folder = folder / ".job"
    record = job_folder / "settings.json"
    npz = npz_path(folder)
    pictures = (
        entry for entry in os.scandir(folder) if entry.name.endswith(".png") and entry.is_file()
    )
    is_new = not npz.exists() and not any(pictures)
    grows = not is_new and _check_record(folder, record, settings, can_grow)
    if is_new or grows:
        with atomic_write(record, "w", durable=True, through_link=False) as file:
            json.dump(settings, file, indent=2)
        for changed in (job_folder, folder, folder.parent):
            sync_folder(changed)
    remove_partial_files(folder, r"\d+\.png")
    remove_partial_files(npz.parent, re.escape(temporary_stem(npz.name)))
    remove_partial_files(job_folder, ".*")
    return grows


def _check_record(folder: Path, record: Path, settings: dict, can_grow: bool) -> bool:
    """Compare `settings` with the file `record`. Return whether they only increase the number of
    pictures. Raises UsageError for any other difference.
    """
    try:
        earlier = read_json(record)
    except (OSError, ValueError):
        raise UsageError(
            f"{folder} contains pictures or its .npz exists, without a record of their settings "
            f"({record} is missing or corrupt)",
            "move them, or use another `sample_dir`",
            parameter="sample_dir",
        ) from None
    if earlier.get(KERNELS_SETTING) != settings.get(KERNELS_SETTING):
        log.warning(
            f"{folder}: was made with other kernels; new pictures may differ in their last bits"
        )
    free = {KERNELS_SETTING} | (LEGACY_SETTINGS - settings.keys())
    grows = earlier.get(COUNT_SETTING, 0) < settings.get(COUNT_SETTING, 0)
    remedy = "give the same, or another `sample_dir`"
    if grows and can_grow:
        free |= {COUNT_SETTING}
    elif grows:
        remedy += ": this order of labels depends on the number of pictures"
    begun = f"the pictures in {folder} were begun with"
    require_equal(settings, earlier, free, begun, remedy)
    return grows
