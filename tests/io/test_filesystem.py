"""Files that are whole or absent, and where caches are kept."""

import os
import stat
import time

import forks
import pytest

from accel.io import filesystem
from accel.io.filesystem import (
    atomic_write,
    cache_folder,
    read_json,
    read_small,
)


def test_whole_or_absent(tmp_path):
    path = tmp_path / "a"
    with atomic_write(path) as out:
        out.write(b"one")
        assert not path.exists()
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as out:
        out.write(b"two")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"one" and list(tmp_path.iterdir()) == [path]


def test_a_link_keeps_its_target_and_a_file_its_mode(tmp_path):
    """`--output` through a link writes to what it points to, even where that is not there yet."""
    target = tmp_path / "deep" / "target"
    link = tmp_path / "link"
    early = tmp_path / "early"
    target.parent.mkdir()
    target.write_bytes(b"before")
    target.chmod(0o640)
    link.symlink_to("deep/target")
    early.symlink_to("deep/later")
    for path in (link, early):
        with atomic_write(path, "w", durable=True) as out:
            out.write("after")
        assert path.is_symlink() and path.read_text() == "after"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640 and (tmp_path / "deep" / "later").is_file()
    assert sorted(file.name for file in target.parent.iterdir()) == ["later", "target"]


def test_two_writers_of_one_file_both_end_well(tmp_path):
    """Processes and threads, over and over: the file is always one of theirs, whole."""
    path = tmp_path / "x"
    length = 1 << 20
    code = f"""
import sys
from accel.io.filesystem import atomic_write
for _ in range(50):
    with atomic_write({str(path)!r}) as file:
        file.write(sys.argv[1].encode() * {length})
"""
    writers = [forks.Fork(["-c", code, letter]) for letter in "ab"]
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            assert path.read_bytes() in (b"a" * length, b"b" * length)
        time.sleep(0.005)
    assert [writer.returncode for writer in writers] == [0, 0], [
        writer.text() for writer in writers
    ]
    assert os.listdir(tmp_path) == ["x"]


def test_what_is_no_file_is_not_replaced(tmp_path):
    """Not even through a link, such as one to a device, which root could replace."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "folder").mkdir()
    before = sorted(os.listdir(tmp_path))
    for name in ("pipe", "link", "folder"):
        for through_link in (True, False):
            with (
                pytest.raises(OSError, match="a pipe"),
                atomic_write(tmp_path / name, through_link=through_link),
            ):
                pass
    assert sorted(os.listdir(tmp_path)) == before and (tmp_path / "pipe").is_fifo()


def test_what_is_no_small_json_file_is_an_error_at_once(tmp_path):
    """Also a pipe, which nobody writes."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 40)
    for number, content in enumerate((b"", b"\xff\xfe", b"[1]", b'{"a": 1')):
        (tmp_path / str(number)).write_bytes(content)
    for path in (*tmp_path.iterdir(), tmp_path / "absent"):
        with pytest.raises((OSError, ValueError)):
            read_json(path)
    good = tmp_path / "good"
    good.write_bytes(b'\xef\xbb\xbf{"a": "\xc3\xa4"}')  # as Windows' editors begin a file
    assert read_json(good) == {"a": "ä"}
    assert read_small(good, 99) == good.read_bytes()
    with pytest.raises(OSError, match="larger than 5 bytes"):
        read_small(good, 5)


def test_the_cache_folder(tmp_path, monkeypatch):
    """Without a home it is private to the user, and never another's."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "dit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "dit"
    monkeypatch.setattr(filesystem.Path, "home", no_home)
    monkeypatch.setattr(filesystem.tempfile, "tempdir", str(tmp_path))
    folder = cache_folder()
    assert (
        folder == cache_folder()
        and folder.parent == tmp_path
        and stat.S_IMODE(folder.stat().st_mode) == 0o700
    )
