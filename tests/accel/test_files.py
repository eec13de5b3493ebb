"""Files that are whole or absent, and where caches are kept."""

import os
import stat

import pytest

from accel import files
from accel.files import atomic_write, cache_folder


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
    target, link, early = tmp_path / "deep" / "target", tmp_path / "link", tmp_path / "early"
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


def test_long_names(tmp_path):
    """The temporary name is no longer than the file system takes."""
    with atomic_write(tmp_path / ("x" * 255)) as out:
        out.write(b"1")
    assert os.listdir(tmp_path) == ["x" * 255]
    with pytest.raises(OSError, match="File name too long"), atomic_write(tmp_path / ("x" * 256)):
        pass
    assert os.listdir(tmp_path) == ["x" * 255]


def test_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "dit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "dit"


def test_the_cache_folder_without_a_home(tmp_path, monkeypatch):
    """Private to the user, and never another's."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(files.Path, "home", no_home)
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    folder = cache_folder()
    assert folder == cache_folder() and folder.parent == tmp_path and stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.setattr(files.os, "getuid", lambda: 12345)
    (tmp_path / "dit-12345").mkdir()  # somebody else's
    assert cache_folder() != tmp_path / "dit-12345" and cache_folder().parent == tmp_path
