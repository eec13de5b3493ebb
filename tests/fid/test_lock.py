"""One job at a time in a folder."""

import errno
import fcntl
import os
import signal
import socket
import threading
import time

import forks
import pytest

from accel.errors import USAGE, UsageError
from accel.fid import lock
from accel.fid.lock import sole_job
from accel.files import NO_FILE

PATIENCE = 3.0  # seconds, for these tests; what needs less than this has not waited it out
HOLD = """
import pathlib, sys, time
from accel.fid import lock
lock.BEAT = 0.1
if "unsupported" in sys.argv:
    import fcntl
    def flock(*_): raise OSError(95, "Operation not supported")
    fcntl.flock = flock
with lock.sole_job(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.1)
    monkeypatch.setattr(lock, "PATIENCE", PATIENCE)
    return tmp_path / "pictures"


@pytest.fixture
def holder(folder):
    """Start a process that holds the folder."""
    started = []

    def start(*how):
        process = forks.Fork(["-c", HOLD, folder, *how])
        started.append(process)
        process.wait_for("held")
        return process

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def no_flock(monkeypatch):
    """A file system without flock, such as Lustre mounted so: there is none on a test machine."""

    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)


def refusal(folder):
    with pytest.raises(UsageError) as caught, sole_job(folder):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def seconds_to_take(folder):
    start = time.monotonic()
    with sole_job(folder):
        return time.monotonic() - start


def test_the_second_job_is_refused_and_the_first_is_named(folder, holder):
    first = holder()
    here = f"(process {first.pid} on {socket.gethostname()} since {time.strftime('%Y-')}"
    assert f"--sample-dir: {folder} is in use by another job {here}" in refusal(folder)
    first.send_signal(signal.SIGSTOP)  # it lives, and shows none
    assert here in refusal(folder)
    first.send_signal(signal.SIGCONT)
    assert here in refusal(folder) and first.poll() is None


def test_a_killed_holder_keeps_nothing(folder, holder):
    for _ in range(3):
        first = holder()
        first.kill()
        first.wait()
        assert seconds_to_take(folder) < PATIENCE
    first = holder()
    threading.Timer(0.05, first.kill).start()  # a process that is being torn down when its successor starts
    first.send_signal(signal.SIGSTOP)
    with sole_job(folder):
        pass


def test_it_is_left_as_it_was_found(folder):
    for _ in range(2):
        with sole_job(folder):
            [file] = (folder / ".job").iterdir()
            assert f"process {os.getpid()} on " in file.read_text()
        assert file.read_bytes() == b""
    with pytest.raises(KeyError), sole_job(folder):
        raise KeyError
    assert file.read_bytes() == b""


def on_another_host(folder):
    (folder / ".job").mkdir(parents=True)
    (folder / ".job" / "lock").write_text("process 7 on elsewhere since 2024-01-01 00:00:00")


def test_a_holder_on_another_host_lives_as_long_as_it_shows_life(folder, capsys):
    """There flock proves nothing: some file systems keep it within a host."""
    on_another_host(folder)
    stop = threading.Event()

    def touch():
        while not stop.wait(0.1):
            os.utime(folder / ".job" / "lock")

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        assert "(process 7 on elsewhere since 2024-01-01 00:00:00)" in refusal(folder)
    finally:
        stop.set()
        thread.join()
    assert seconds_to_take(folder) >= PATIENCE
    assert "process 7 on elsewhere since 2024-01-01 00:00:00 did not end well; waiting 3 s" in capsys.readouterr().out


def test_without_flock_the_record_decides(folder, holder, no_flock):
    first = holder("unsupported")
    assert f"process {first.pid} on " in refusal(folder)
    first.kill()
    first.wait()
    assert seconds_to_take(folder) >= PATIENCE
    assert seconds_to_take(folder) < PATIENCE  # after a good end nobody waits


def test_who_has_lost_the_folder_ends(folder, holder):
    """Two that started at the same moment without flock, or one that was suspended for longer than PATIENCE."""
    first = holder("unsupported")
    (folder / ".job" / "lock").write_text("process 7 on elsewhere since 2024-01-01 00:00:00")
    out, error = first.communicate(timeout=10)
    assert first.returncode == USAGE and error.count("\n") == 1
    assert "in use by another job (process 7 on elsewhere" in error


@pytest.mark.parametrize("name", ["x" * 300, "file/pictures", "private/pictures", "full/pictures"])
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "full").mkdir(mode=0o500)
    root = os.geteuid() == 0
    if root:
        tmp_path.chmod(0o755)
        os.seteuid(65534)  # to whom the folders say no
    try:
        with (
            pytest.raises(UsageError, match="^--sample-dir .*(long|directory|denied)") as caught,
            sole_job(tmp_path / name),
        ):
            pass
    finally:
        if root:
            os.seteuid(0)
    assert "\n" not in str(caught.value)


def test_a_lock_is_never_taken_through_a_link(folder, tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (folder / ".job").mkdir(parents=True)
    place = folder / ".job" / "lock"
    for put in (lambda: place.symlink_to(precious), lambda: os.mkfifo(place), place.mkdir):
        put()
        start = time.monotonic()
        assert f"--sample-dir {place}: {NO_FILE}; remove it" in refusal(folder)
        assert time.monotonic() - start < 1 and precious.read_bytes() == b"precious"
        place.rmdir() if place.is_dir() else place.unlink()


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\0" * 60, b"a\nb\x1b[31m", b"x" * 100_000])
def test_a_damaged_record_is_waited_for_and_shown_in_one_line(folder, content, capsys):
    """As a power cut leaves it."""
    (folder / ".job").mkdir(parents=True)
    (folder / ".job" / "lock").write_bytes(content)
    assert seconds_to_take(folder) >= PATIENCE
    [line] = capsys.readouterr().out.splitlines()
    assert line.isprintable() and len(line) < 500 + len(str(folder)) and "did not end well" in line
