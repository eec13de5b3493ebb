"""Files that are whole or absent."""

import os
from pathlib import Path

import pytest

from accel.files import atomic_write, cache_folder, sync_folder


@pytest.mark.parametrize("durable", (False, True))
def test_a_file_is_whole_or_absent(tmp_path, durable):
    path = tmp_path / "x.json"
    for mode, content in (("wb", b"first"), ("w", "second")):
        with atomic_write(path, mode, durable) as file:
            file.write(content)
            assert len(os.listdir(tmp_path)) == 1 + (mode == "w")  # the partial one, and what was there before
        assert path.read_text() in ("first", "second") and os.listdir(tmp_path) == ["x.json"]
    with pytest.raises(ZeroDivisionError), atomic_write(path, durable=durable) as file:
        file.write(b"third" * 1000)
        raise ZeroDivisionError
    assert path.read_text() == "second" and os.listdir(tmp_path) == ["x.json"]
    sync_folder(tmp_path)


def test_where_caches_lie(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "dit" and not cache_folder().exists()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == Path(tmp_path) / ".cache" / "dit"
