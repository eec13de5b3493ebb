"""What an FID job makes: the order, the pictures, and their batches."""

import hashlib
import io
from collections.abc import Collection
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from accel.errors import UsageError
from accel.files import atomic_write, read_small

CODE = "this code's kernels"  # the setting that may change while a job is interrupted


class Order(NamedTuple):
    """What an FID job is asked for."""

    folder: Path
    count: int  # pictures of the archive; upstream's way makes some more
    batch_size: int  # pictures that a rank makes at a time
    seed: int
    num_classes: int
    image_size: int  # pixels of a side
    latent: tuple[int, int, int]  # (C, L, L)
    copies: int = 2  # normals that a step of upstream's stream draws for a picture: 2 with guidance, else 1
    balanced: bool = False  # as many pictures of each class; else random classes
    noise_from_cpu: bool = False  # of the steps of upstream's stream
    independent: bool = False  # noise and labels keyed by picture; else upstream's stream, a seed a rank

    @property
    def batch_sizes(self) -> set[int]:
        """Numbers of pictures in a batch: upstream's way makes whole ones."""
        if not self.independent:
            return {self.batch_size}
        return {min(self.batch_size, self.count), self.count % self.batch_size} - {0}


def npz_of(folder: Path) -> Path:
    """The archive of a folder's pictures."""
    return folder.with_name(f"{folder.name}.npz")


def picture_name(number: int) -> str:
    """The name of a picture's file."""
    return f"{number:06d}.png"


def write_picture(path: Path, pixels: np.ndarray) -> str:
    """Write pixels (H, W, 3) uint8 as a PNG, durably. Returns the file's digest, 16 hex digits."""
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, format="PNG")
    with atomic_write(path, durable=True, through_link=False) as file:
        file.write(content.getvalue())
    return _digest(content.getvalue())


def read_picture(path: Path, digests: Collection[str]) -> np.ndarray:
    """Pixels (H, W, 3) uint8 of a file that `write_picture` made. UsageError if its digest is not among `digests`."""
    content = b""
    with suppress(OSError):
        content = read_small(path, 2**28)
    if _digest(content) not in digests:
        raise UsageError(f"{path}: is unreadable or was changed; delete it and start again: it is made anew")
    return np.asarray(Image.open(io.BytesIO(content)))


def _digest(content):
    return hashlib.sha256(content).hexdigest()[:16]


class Batches:
    """Which batch holds which pictures, and which rank makes it.

    Upstream's way: in a round each rank makes n pictures, interleaved by rank; the total is rounded up to whole rounds.
    The world-independent way: batch b is pictures b·n … b·n + n - 1, whoever makes it; the last may be smaller.
    """

    def __init__(self, order: Order, rank: int, world: int):
        self.order, self.rank, self.world = order, rank, world
        if order.independent:
            self.count, self.total = ceil(order.count / order.batch_size), order.count  # of all ranks
        else:
            self.count = world * ceil(order.count / (world * order.batch_size))
            self.total = self.count * order.batch_size

    def left(self, finished: Collection[int]) -> list[int]:
        """This rank's share of the batches that are not in `finished`, in order."""
        if self.order.independent:
            return [batch for batch in range(self.count) if batch not in finished][self.rank :: self.world]
        return [batch for batch in range(self.rank, self.count, self.world) if batch not in finished]

    def pictures(self, batch: int) -> range:
        """Picture numbers of a batch. In upstream's way, batch i·world + rank is the i-th of that rank."""
        n = self.order.batch_size
        if self.order.independent:
            return range(batch * n, min((batch + 1) * n, self.order.count))
        index, rank = divmod(batch, self.world)
        return range(index * self.world * n + rank, (index + 1) * self.world * n, self.world)
