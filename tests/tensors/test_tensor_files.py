"""Digests of weights, and how they are kept."""

import os
import time

import pytest
import torch

from accel.tensors.digests import DIGEST_FOLDER, cached_digest, digest


@pytest.mark.parametrize("place", [0, 2**16 - 1, 2**16, 2**18 + 12, -1])
def test_a_digest_covers_every_value(place):
    """Of large tensors too."""
    state = {"large": torch.zeros(3, 2**17 + 5), "small": torch.ones(2)}
    before = digest(state)
    state["large"].view(-1)[place] = 1e-30
    assert digest(state) != before and len(before) == 16


def test_a_digest_covers_names_and_shapes():
    one = torch.ones(4)
    two = torch.zeros(4)
    states = (
        {"a": one, "b": two},
        {"b": one, "a": two},
        {"a": one.view(2, 2), "b": two},
        {"a": one, "c": two},
    )
    assert len({digest(state) for state in states}) == len(states)
    assert digest({"b": two, "a": one}) == digest(states[0])


def test_what_is_kept_of_a_digest_is_whole_and_of_an_old_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stamps = [("a", 1, 0, 0, time.time_ns() + 10**12)]
    state = {"a": torch.ones(3)}
    want = cached_digest(stamps, lambda: state)
    # files just written: a change within the clock's resolution would go unseen
    assert not (tmp_path / "dit").exists()
    stamps = [("a", 1, 0, 0, 0)]
    assert cached_digest(stamps, lambda: state) == want
    [kept] = (tmp_path / "dit" / DIGEST_FOLDER).iterdir()
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    for text in (b"", b"x" * 16, b"\xff" * 16, b"0" * 17):
        kept.write_bytes(text)
        assert cached_digest(stamps, lambda: state) == want == kept.read_text()
    for put in (
        os.mkfifo,
        lambda place: place.symlink_to(tmp_path / "pipe"),
        lambda place: place.symlink_to(precious),
    ):
        kept.unlink()
        put(kept)
        assert cached_digest(stamps, lambda: state) == want  # a pipe is not waited for
    assert precious.read_bytes() == b"precious"
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")  # where nothing can be kept
    assert cached_digest(stamps, lambda: state) == want
