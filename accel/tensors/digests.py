"""Digests of weights, independent of the file format and cached."""

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from accel.io.filesystem import atomic_write, cache_folder, read_small

# Two changes of a file within this time may have the same time stamp.
TIMESTAMP_RESOLUTION_NS = 2e9
# In the cache folder. Change the name whenever `digest` changes.
DIGEST_FOLDER = "digests-3"


def digest(state: dict[str, torch.Tensor]) -> str:
    """Hash names, shapes and float32 values to 16 hex digits, independent of file format and order
    of entries.
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
    """Return `digest(state())`, cached by the files' stamps and `entry`. stamps: taken before the
    files were opened.
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
            path = cache_folder() / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path, "w", through_link=False) as file:
                file.write(value)
    return value
