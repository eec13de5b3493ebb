"""Lock a folder for one job with flock, which the kernel releases when the process ends."""

import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from accel.errors import UsageError, path_errors, shown

log = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 2.0  # a killed process needs time to exit


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Create the folder and lock it. Raises UsageError that names the running job if it is locked.

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
