"""Files that are whole or absent, and the folder of the user's caches."""

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def atomic_write(path: str | Path, mode: str = "wb", durable: bool = False) -> Iterator[IO]:
    """Open a file that gets the name `path` when the block ends well; an error or Ctrl-C removes it.

    durable: its bytes are on disk before it gets the name. A symbolic link keeps pointing where it does, and a file
    that is replaced passes on its permissions. No two writers share a temporary name.
    """
    path = Path(os.path.realpath(path))
    partial = path.with_name(f".{path.name[:200]}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with open(partial, mode) as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if path.exists():
            partial.chmod(path.stat().st_mode & 0o7777)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def sync_folder(folder: str | Path) -> None:
    """Put the names in `folder` on disk: they are the folder's data, not the files'."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cache_folder() -> Path:
    """The user's cache folder of this program; it may not exist yet. Without a home, a private temporary folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dit"
    except RuntimeError:  # a container's user without a passwd entry
        folder = Path(tempfile.gettempdir(), f"dit-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder if folder.stat().st_uid == os.getuid() else Path(tempfile.mkdtemp(prefix="dit-"))
