"""One job at a time in a folder."""

import errno
import fcntl
import signal
import socket
import threading
import time
from contextlib import nullcontext

import forks
import pytest
from conftest import mistake

from accel.errors import UsageError
from accel.jobs.fid.folder import folder_lock

HOLD = """
import pathlib, sys, time
from accel.jobs.fid.folder import folder_lock
with folder_lock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "pictures"


@pytest.fixture
def holder(folder):
    """Start a process that holds the folder."""
    started = []

    def start():
        process = forks.Fork(["-c", HOLD, folder])
        started.append(process)
        process.wait_for("held")
        return process

    yield start
    for process in started:
        process.kill()


def refusal(folder):
    with pytest.raises(UsageError) as caught, folder_lock(folder):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_second_job_is_refused_and_the_first_is_named(folder, holder):
    first = holder()
    here = f"(process {first.pid} on {socket.gethostname()} since {time.strftime('%Y-')}"
    assert f"sample_dir: {folder} is in use by another job {here}" in refusal(folder)
    first.send_signal(signal.SIGSTOP)  # it lives
    assert here in refusal(folder)
    first.send_signal(signal.SIGCONT)


def test_a_killed_holder_keeps_nothing(folder, holder, monkeypatch):
    for _ in range(3):
        first = holder()
        first.kill()
        first.wait()
        with folder_lock(folder):
            pass
    # a busy machine takes its time
    monkeypatch.setattr("accel.jobs.fid.folder.RELEASE_TIMEOUT_S", 200.0)
    first = holder()
    first.send_signal(signal.SIGSTOP)
    # a process that is being torn down when its successor starts
    threading.Timer(0.5, first.kill).start()
    start = time.monotonic()
    with folder_lock(folder):
        assert time.monotonic() - start > 0.4


@pytest.mark.parametrize("length, fits", [(250, True), (252, False)])
def test_an_archives_name_that_is_too_long_is_refused_first(length, fits, tmp_path):
    """The folder itself fits, and so does its work."""
    folder = tmp_path / (length // 2 * "é")
    how = mistake("sample_dir", ".npz")
    with nullcontext() if fits else how, folder_lock(folder):
        pass
    assert folder.is_dir()


def test_a_file_system_without_locks_is_named(folder, monkeypatch, capsys):
    """Such as Lustre mounted so: there is none on a test machine."""

    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with folder_lock(folder), folder_lock(folder):
        pass
    line = f"{folder}: this file system has no locks (Operation not supported); start one job at a time here\n"
    assert capsys.readouterr().out == 2 * line
