"""Files that are whole or absent, small files that are read safely, and the folder of the
user's caches.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]  # a checkout, or an environment's site-packages
NOT_A_FILE = "is a folder, a pipe, a socket, a device or a link, not a file"
SMALL_FILE_BYTES = 2**24  # bytes: no plan, record, cache or configuration comes near it
STEM_BYTES = 200  # bytes of a file's name that its temporary name has, of the 255 of any name


@contextmanager
def atomic_write(
    path: str | Path,
    mode: str = "wb",
    durable: bool = False,
    through_link: bool = True,
    replace: bool = True,
) -> Iterator[IO]:
    """Open a file that gets the name `path` when the block ends well; an error or Ctrl-C
    removes it.

    durable: its bytes are on disk before it gets the name. A file that is replaced passes
    on its permissions. A link keeps its target, or is itself replaced without
    `through_link`. Without `replace` a file that has appeared meanwhile stays, and the new one is
    dropped. Raises OSError if path is not a regular file. The temporary name is random and made
    exclusively: no two writers share one, and none is written through a link.
    """
    path = Path(os.path.realpath(path)) if through_link else Path(path)
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, NOT_A_FILE, str(path))
    partial = path.with_name(f".{temporary_stem(path.name)}.{secrets.token_hex(8)}.part")
    try:
        handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        # the name that a user knows
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with open(handle, mode) as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if replace and path.exists():
            partial.chmod(path.stat().st_mode & 0o7777)
        if replace or not _link_unless_taken(partial, path):
            os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _link_unless_taken(partial: Path, path: Path) -> bool:
    """Give a temporary file the name `path` unless a file has it. Return whether a file has it
    then: not on a file system without links.
    """
    with suppress(OSError):
        os.link(partial, path)
    if path.exists():
        partial.unlink(missing_ok=True)
    return path.exists()


def temporary_stem(name: str) -> str:
    """Return the beginning of a file's name that its temporary name has: whole characters."""
    return os.fsencode(name)[:STEM_BYTES].decode(errors="ignore")


def remove_partial_files(folder: Path, name: str) -> None:
    """Remove temporary files that killed processes left in `folder`; name: a regular
    expression of the files meant.
    """
    left = re.compile(rf"\.(?:{name})\.[0-9a-f]{{16}}\.part")
    with suppress(PermissionError, FileNotFoundError):  # another process may remove them too
        for entry in list(os.scandir(folder)):
            if left.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)


def require_writable(folder: str | Path) -> None:
    """Raise OSError unless files can be made in `folder`. Where the file system allows
    it, the probe has no name.
    """
    with tempfile.TemporaryFile(dir=folder):
        pass


def require_name(path: str | Path) -> None:
    """Raise OSError if the file system refuses the name of a file, such as for its length."""
    with suppress(FileNotFoundError):
        os.lstat(path)


def is_utf8(path: str | Path) -> bool:
    """Return whether a path is UTF-8: C++ and Rust libraries open no others."""
    return str(path).encode(errors="ignore").decode() == str(path)


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a regular file in binary. Raises OSError for others."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its other end
        raise OSError(errno.EINVAL, NOT_A_FILE, str(path))
    return open(path, "rb")


def read_small(path: str | Path, most: int = SMALL_FILE_BYTES) -> bytes:
    """Return the bytes of a regular file. Raises OSError, also for more than `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
    return content


def read_json(path: str | Path) -> dict:
    """Return the object in a small JSON file, in UTF-8. Raises OSError, or ValueError for
    any other content.
    """
    content = json.loads(read_small(path).decode("utf-8-sig"))
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content


def sha256_of(file: IO[bytes]) -> str:
    """Return the SHA-256 of an open file from its beginning, in hexadecimal."""
    file.seek(0)
    digest = hashlib.sha256()
    while block := file.read(2**22):
        digest.update(block)
    return digest.hexdigest()


def sync_folder(folder: str | Path) -> None:
    """Put the names in `folder` on disk: they are the folder's data, not the files'."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checkout_version() -> str | None:
    """Return the version in pyproject.toml; None in an installed copy, which has no such
    file.
    """
    with suppress(OSError):
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        # site-packages may have a file of this name from another package
        stated = re.search(r'^name = "dit-sampling"\nversion = "(.*)"$', text, re.M)
        return stated and stated[1]
    return None


def weights_folder() -> Path:
    """Return the folder of published weights and the demo: a checkout's
    pretrained_models/, else the user's cache folder.
    """
    return ROOT / "pretrained_models" if checkout_version() else cache_folder()


def cache_folder() -> Path:
    """Return the user's cache folder, which may not exist yet; without a home directory a
    private temporary one.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dit"
    except RuntimeError:  # a container's user without a passwd entry
        folder = Path(tempfile.gettempdir(), f"dit-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        return (
            folder if folder.stat().st_uid == os.getuid() else Path(tempfile.mkdtemp(prefix="dit-"))
        )
