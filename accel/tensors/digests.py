"""Digests of weights: the same for every format, and kept in the cache folder."""

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from accel.io.filesystem import atomic_write, cache_folder, read_small

# ns: two changes of a file that come sooner after one another may have the same time
# stamp
TIMESTAMP_RESOLUTION_NS = 2e9
# In the cache folder; another name for other rules of what a digest is of.
DIGEST_FOLDER = "digests-3"


def digest(state: dict[str, torch.Tensor]) -> str:
    """Return 16 hex digits over names, shapes and all float32 values, the same for every
    format and order of entries.
    """
    total = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().float().contiguous().flatten()
        total.update(f"{name} {tuple(state[name].shape)}\n".encode())
        total.update(tensor.numpy().data)
    return total.hexdigest()[:16]


def cached_digest(
    stamps: Sequence[tuple], state: Callable[[], dict[str, torch.Tensor]], entry: str = ""
) -> str:
    """Return `digest(state())` of an entry of files with these stamps, taken before they were
    opened; the cache folder keeps it.
    """
    key = repr((stamps, entry))
    name = Path(DIGEST_FOLDER, hashlib.sha256(key.encode()).hexdigest()[:32])
    with suppress(OSError, ValueError):
        value = read_small(cache_folder() / name).decode()
        if re.fullmatch("[0-9a-f]{16}", value):
            return value
    value = digest(state())
    newest = max(ctime for *_, ctime in stamps)
    if time.time_ns() - newest > TIMESTAMP_RESOLUTION_NS:
        with suppress(OSError):
            kept = cache_folder() / name
            kept.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(kept, "w", through_link=False) as file:
                file.write(value)
    return value
