"""One job at a time in a folder, and a dead job keeps nothing.

flock decides where the file system has it: it ends with the process that holds it. Some file systems keep it within one
host, and some lack it. So the holder also writes into .job/lock who it is, and touches the file every BEAT seconds. A
job that finds the record of another host watches it: if it is touched within PATIENCE, its job lives.
"""

import fcntl
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accel.errors import USAGE, UsageError, path_errors
from accel.files import open_regular, read_small

BEAT = 2.0  # seconds between two signs of life
PATIENCE = 20.0  # seconds without one after which a job on another host is dead


@contextmanager
def sole_job(folder: Path) -> Iterator[None]:
    """Make the folder and keep other jobs out of it inside. UsageError names the job that is at work there."""
    path, here, ended = folder / ".job" / "lock", f"on {socket.gethostname()} since", threading.Event()
    record = f"process {os.getpid()} {here} {time.strftime('%Y-%m-%d %H:%M:%S')}"

    def show_life():
        while not ended.wait(BEAT):
            with suppress(OSError):
                if (now := _read(path)) != record:  # a job elsewhere has the folder: write nothing more
                    print(_in_use(folder, now), file=sys.stderr, flush=True)
                    os._exit(USAGE)
                os.utime(path)

    with path_errors("--sample-dir", folder):
        path.parent.mkdir(parents=True, exist_ok=True)
    with path_errors("--sample-dir", path, "remove it, or use another"):
        file = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)  # never through a link
    with file:
        with path_errors("--sample-dir", folder):
            _wait(folder, path, here, file)
            file.truncate(0)
            file.write(record.encode())
            file.flush()
        thread = threading.Thread(target=show_life, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            file.truncate(0)


def _wait(folder, path, here, file):
    """Return when no living job holds the folder. UsageError if one does."""
    before, deadline = None, time.monotonic() + PATIENCE
    while True:
        flock = _flock(file)
        seen = (_read(path), path.stat().st_mtime_ns)  # opened first: then a network file system asks its server
        record = seen[0]
        silent = time.monotonic() > deadline
        if flock != "held" and (silent or not record or (flock == "ours" and here in record)):
            return
        if silent or (record and before not in (None, seen)):
            raise UsageError(_in_use(folder, record))
        if before is None and flock != "held":
            print(f"{folder}: {record} did not end well; waiting {PATIENCE:.0f} s for a sign that it is still at work")
        before = seen
        time.sleep(BEAT / 10)


def _read(path):
    """The record, or what stands in its place: one line that can be shown."""
    text = read_small(path).decode(errors="replace")
    return text if text.isprintable() and len(text) < 500 else repr(text[:60])


def _flock(file):
    """Try to lock: "ours", "held" by another process, or "unsupported" by the file system."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "held"
    except OSError:
        return "unsupported"
    return "ours"


def _in_use(folder, record):
    return f"--sample-dir: {folder} is in use by another job ({record}); wait for it, or use another"
