"""The folder of an FID job: the plan, its batches and pictures, and the settings that
make them.

A picture gets its name when its bytes are on disk: a file under a picture's name is a
finished picture.
"""

import io
import json
import logging
import os
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from accel.errors import UsageError, require_equal
from accel.families import LabelOrder
from accel.io.filesystem import (
    atomic_write,
    read_json,
    read_small,
    remove_partial_files,
    sync_folder,
    temporary_stem,
)

log = logging.getLogger(__name__)

KERNELS_SETTING = "this code's kernels"  # the setting that may change while a job is interrupted
COUNT_SETTING = "--num-fid-samples"  # the setting that may grow
# Settings that older records have beside their outcome, such as the contents of --ckpt. Only a job
# that has them itself compares them.
LEGACY_SETTINGS = {"--num-heads", "--weights-entry", "--balanced-labels"}
# Settings that nodes of one job may differ in.
MACHINE_SETTINGS = {"device", "torch", "number of threads", KERNELS_SETTING}
# Threads that compress PNGs: 16 ms per picture of 256 px, 60 ms of 512 px. Four keep up
# with twice what an H200 makes.
WRITER_THREADS = 4


class Plan(NamedTuple):
    """The pictures that an FID job has to make."""

    folder: Path
    count: int  # type: ignore[assignment]  # pictures of the archive; upstream's way makes some more
    batch_size: int  # pictures that a rank makes at a time
    seed: int
    num_classes: int
    image_size: int  # pixels of a side
    latent: tuple[int, int, int]  # (C, L, L)
    # Rows of noise that a step of upstream's stream draws for a picture: 2 with guidance, else 1.
    drawn: int = 2
    labels: LabelOrder = "random"
    # Noise and labels are keyed by picture; else upstream's stream, one seed per rank.
    independent: bool = False

    @property
    def can_grow(self) -> bool:
        """Return whether the first pictures are those of a plan of more."""
        return self.labels in ("random", "by_number")

    @property
    def batch_sizes(self) -> set[int]:
        """Return the numbers of pictures in a batch: upstream's way makes whole ones."""
        if not self.independent:
            return {self.batch_size}
        return {min(self.batch_size, self.count), self.count % self.batch_size} - {0}


class Batches:
    """The division of a plan's pictures into batches and ranks.

    Upstream's way: in a round each rank makes n pictures, interleaved by rank or, class by
    class, in a row; the total is rounded up to whole rounds. The world-independent way: a
    round is one batch, made by any rank; the last may be smaller.
    """

    def __init__(self, plan: Plan, rank: int, world: int):
        self.plan = plan
        self.rank = rank
        self.world = world
        self.in_round = 1 if plan.independent else world  # batches; pictures are interleaved
        rounds = ceil(plan.count / (self.in_round * plan.batch_size))
        self.count = self.in_round * rounds  # batches of all ranks
        self.total = plan.count if plan.independent else self.count * plan.batch_size

    def finished(self) -> set[int]:
        """Return the batches of all ranks whose pictures are all in the folder."""
        files = {entry.name for entry in os.scandir(self.plan.folder) if entry.is_file()}
        return {
            batch
            for batch in range(self.count)
            if files.issuperset(map(picture_name, self.pictures(batch)))
        }

    def to_draw(self, finished: Collection[int]) -> list[int]:
        """Return the batches whose noise this rank draws, in order: its share of those that are
        not in `finished`; in upstream's stream also the finished ones before its last.
        """
        if self.plan.independent:
            left = [batch for batch in range(self.count) if batch not in finished]
            return left[self.rank :: self.world]
        batches = range(self.rank, self.count, self.world)
        last = max((batch for batch in batches if batch not in finished), default=-1)
        return [batch for batch in batches if batch <= last]

    def pictures(self, batch: int) -> range:
        """Return the picture numbers of a batch. In upstream's way, batch i·world + rank
        is the i-th of that rank.
        """
        step = 1 if self.plan.labels == "class_by_class" else self.in_round
        index, offset = divmod(batch, step)
        size = step * self.plan.batch_size
        first = index * size
        return range(first + offset, min(first + size, self.total), step)

    def first_of_rank(self, batch: int) -> int:
        """Return the position of a batch's first picture where each rank's pictures stand in
        a row, rank 0's first.
        """
        index, offset = divmod(batch, self.in_round)
        return (offset * (self.count // self.in_round) + index) * self.plan.batch_size


def npz_path(folder: Path) -> Path:
    """Return the path of the archive of a folder's pictures."""
    return folder.with_name(f"{folder.name}.npz")


def picture_name(number: int) -> str:
    """Return the name of a picture's file."""
    return f"{number:06d}.png"


def write_pictures(folder: Path, numbers: range, pixels: np.ndarray) -> None:
    """Write pixels (n, H, W, 3) uint8 as PNGs. Each is on disk before it has its name. Those that
    are there stay.
    """

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
    """Return pixels (size, size, 3) uint8 of a whole PNG. Raises UsageError for any other
    file. It takes half the time of accel.io.picture_files, whose checks of colours it leaves out.
    """
    try:
        content = read_small(path, 2**28)
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            image.verify()  # the checksum of every chunk; decoding checks none
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if (image.size, image.mode) == ((size, size), "RGB"):
                return np.asarray(image)
    # SyntaxError: a damaged chunk
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        pass
    raise UsageError(
        f"{path}: is not a whole PNG of {size}×{size} pixels; delete it and start again the job "
        "that made it"
    )


def open_folder(folder: Path, settings: dict, can_grow: bool = False) -> bool:
    """Open the folder for a job with `settings`: plain JSON, all that decides the
    pictures' bits by the names that a user knows. Remove files that killed jobs left
    unfinished. can_grow: whether the job may add pictures to a folder that was begun for fewer.
    Return whether it does. Raises UsageError if the folder's pictures were made otherwise.
    """
    home = folder / ".job"
    record = home / "settings.json"
    npz = npz_path(folder)
    pictures = (
        entry for entry in os.scandir(folder) if entry.name.endswith(".png") and entry.is_file()
    )
    grows = False
    is_new = not npz.exists() and not any(pictures)
    if not is_new:
        grows = _check_record(folder, record, settings, can_grow)
    if is_new or grows:
        with atomic_write(record, "w", durable=True, through_link=False) as file:
            json.dump(settings, file, indent=2)
        for changed in (home, folder, folder.parent):
            sync_folder(changed)
    remove_partial_files(folder, r"\d+\.png")
    remove_partial_files(npz.parent, re.escape(temporary_stem(npz.name)))
    remove_partial_files(home, ".*")
    return grows


def _check_record(folder: Path, record: Path, settings: dict, can_grow: bool) -> bool:
    """Return whether `settings` are of more pictures than those in the file `record` of `folder`,
    and the same otherwise. Raises UsageError unless they are these or equal.
    """
    try:
        earlier = read_json(record)
    except (OSError, ValueError):
        raise UsageError(
            f"{folder} holds pictures, or its .npz is there, without a record of how they were "
            f"made ({record} is missing or damaged)",
            "move them, or use another `sample_dir`",
            parameter="sample_dir",
        ) from None
    if earlier.get(KERNELS_SETTING) != settings.get(KERNELS_SETTING):
        log.warning(
            f"{folder}: was begun by other kernels; pictures from here on may differ in their "
            "last bits"
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
