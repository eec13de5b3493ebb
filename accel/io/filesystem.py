"""Atomic writes, safe reads of small files, and the folders of weights and caches."""

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
SMALL_FILE_BYTES = 2**24  # limit for records, caches and configuration files
STEM_BYTES = 200  # of the 255 bytes of a name; a temporary name also has a random part


@contextmanager
def atomic_write(
    path: str | Path,
    mode: str = "wb",
    durable: bool = False,
    through_link: bool = True,
    replace: bool = True,
) -> Iterator[IO]:
    """Open a temporary file that is renamed to `path` when the block succeeds and removed when it
    fails. The mode of an existing file is kept.

    durable: flush to disk before renaming. through_link: write the target of a symbolic link; else
    replace the link. replace: overwrite an existing file; else keep it and drop the new one. Raises
    OSError if `path` is not a regular file. The temporary name is random and created exclusively,
    so that concurrent writers do not interfere.
    """
    path = Path(os.path.realpath(path)) if through_link else Path(path)
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, NOT_A_FILE, str(path))
    partial = path.with_name(f".{temporary_stem(path.name)}.{secrets.token_hex(8)}.part")
    try:
        handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        # name the user's file, not the temporary one
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with open(handle, mode) as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if path.exists() and not replace:
            partial.unlink(missing_ok=True)  # another download may remove partial files
            return
        if path.exists():
            partial.chmod(path.stat().st_mode & 0o7777)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def temporary_stem(name: str) -> str:
    """Return the part of a file's name that its temporary name contains, in whole characters."""
    return os.fsencode(name)[:STEM_BYTES].decode(errors="ignore")


def remove_partial_files(folder: Path, name: str) -> None:
    """Remove temporary files that killed processes left in `folder`. name: a regular expression
    that matches the intended file names.
    """
    temporary = re.compile(rf"\.(?:{name})\.[0-9a-f]{{16}}\.part")
    with suppress(PermissionError, FileNotFoundError):  # another process may remove them too
        for entry in list(os.scandir(folder)):
            if temporary.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)


def require_writable(folder: str | Path) -> None:
    """Raise OSError unless files can be created in `folder`."""
    with tempfile.TemporaryFile(dir=folder):
        pass


def is_utf8(path: str | Path) -> bool:
    """Whether a path is UTF-8; C++ and Rust libraries cannot open other paths."""
    return str(path).encode(errors="ignore").decode() == str(path)


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a regular file for reading bytes. Raises OSError for a pipe, a device or a folder."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe blocks
        raise OSError(errno.EINVAL, NOT_A_FILE, str(path))
    return open(path, "rb")


def read_small(path: str | Path, max_bytes: int = SMALL_FILE_BYTES) -> bytes:
    """Read a regular file. Raises OSError, also if it is larger than `max_bytes`."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes", str(path))
    return content


def read_json(path: str | Path) -> dict:
    """Read an object from a small UTF-8 JSON file. Raises OSError, or ValueError for invalid
    content.
    """
    content = json.loads(read_small(path).decode("utf-8-sig"))
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content


def sha256_of(file: IO[bytes]) -> str:
    """Return the hexadecimal SHA-256 of an open file's whole content."""
    file.seek(0)
    digest = hashlib.sha256()
    while block := file.read(2**22):
        digest.update(block)
    return digest.hexdigest()


def sync_folder(folder: str | Path) -> None:
    """Flush a folder to disk: the names of its files are data of the folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checkout_version() -> str | None:
    """Return the version in pyproject.toml, or None in an installed package, which has no such
    file.
    """
    with suppress(OSError):
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        # site-packages may contain another package's pyproject.toml
        version = re.search(r'^name = "dit-sampling"\nversion = "(.*)"$', text, re.M)
        return version and version[1]
    return None


def weights_folder() -> Path:
    """Return the folder of weights: DIT_WEIGHTS, else pretrained_models/ of a checkout, else the
    cache folder.
    """
    named = os.environ.get("DIT_WEIGHTS")
    if named:
        return Path(named).absolute()
    return ROOT / "pretrained_models" if checkout_version() else cache_folder()


def place_for(name: str, folder: Path) -> str:
    """Return where the user can put weights, for an error: `folder`/name, or, if that is not
    writable, a folder that DIT_WEIGHTS names.
    """
    existing = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    if os.access(existing, os.W_OK, effective_ids=True):
        return str(folder / name)
    return f"{Path('FOLDER', name)} and set DIT_WEIGHTS=FOLDER"


def cache_folder() -> Path:
    """Return the user's cache folder, which may not exist; without a home directory, a private
    temporary folder.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dit"
    except RuntimeError:  # a container's user without a passwd entry
        folder = Path(tempfile.gettempdir(), f"dit-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        return (
            folder if folder.stat().st_uid == os.getuid() else Path(tempfile.mkdtemp(prefix="dit-"))
        )
