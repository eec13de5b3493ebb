"""Files that are whole or absent, and the folder where the user's caches lie."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def atomic_write(path: str | Path, mode: str = "wb", durable: bool = False) -> Iterator[IO]:
    """An open file that gets the name `path` when the block ends well and is removed when it does not.

    durable: its bytes are on disk before it gets the name (see `sync_folder` for the name itself).
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with open(partial, mode) as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def sync_folder(folder: str | Path) -> None:
    """Put a folder's names on disk: without this a renamed file can be gone after a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cache_folder() -> Path:
    """Where compiled kernels, measurements and plans are kept; may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dit"
