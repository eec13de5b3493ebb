"""Pictures, batches and settings of an FID job's folder."""

import json
import os
import re

import numpy as np
import pytest
from conftest import mistake
from plans import plan

from accel.jobs.fid.folder import (
    KERNELS_SETTING,
    Batches,
    npz_path,
    open_folder,
    write_pictures,
)

PIXELS = np.zeros((2, 8, 8, 3), np.uint8)


@pytest.fixture
def folder(tmp_path):
    """The folder of a job as its lock leaves it."""
    (tmp_path / "samples" / "pictures" / ".job").mkdir(parents=True)
    return tmp_path / "samples" / "pictures"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "wanted, n, world, independent",
    [
        (7, 3, 2, False),
        (50, 4, 3, False),
        (1, 8, 4, False),
        (7, 3, 2, True),
        (22, 2, 5, True),
        (3, 8, 4, True),
    ],
)
def test_batches_cover_every_picture_once(wanted, n, world, independent):
    chosen = plan(count=wanted, batch_size=n, independent=independent)
    ranks = [Batches(chosen, rank, world) for rank in range(world)]
    made = sorted(
        number for rank in ranks for batch in rank.to_draw(set()) for number in rank.pictures(batch)
    )
    assert made == list(range(ranks[0].total))
    assert ranks[0].total == (wanted if independent else -(-wanted // (n * world)) * n * world)
    assert chosen.batch_sizes == {
        len(rank.pictures(batch)) for rank in ranks for batch in rank.to_draw(set())
    }
    done = {0, 2}
    to_draw = [rank.to_draw(done) for rank in ranks]
    assert {batch for of_rank in to_draw for batch in of_rank} - done == set(
        range(ranks[0].count)
    ) - done
    assert not any(of_rank and of_rank[-1] in done for of_rank in to_draw)
    assert not independent or not any(done & set(of_rank) for of_rank in to_draw)


def test_bytes_are_on_disk_before_the_names_that_rely_on_them(folder, monkeypatch):
    """Settings and the folders' names come first, then a batch's pictures, then their folder."""
    order = []
    fsync = os.fsync

    def recorded(handle):
        order.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", recorded)
    open_folder(folder, {"--seed": 1})
    assert order[1:] == [str(folder / ".job"), str(folder), str(folder.parent)]
    order.clear()
    write_pictures(folder, range(2), PIXELS)
    pictures = [re.sub(r"\.\w{16}\.part$", "", path) for path in order[:2]]
    assert sorted(pictures) == [f"{folder}/.000000.png", f"{folder}/.000001.png"]
    assert order[2:] == [str(folder)]


def test_another_start_needs_the_same_settings(folder, capsys):
    open_folder(folder, {"--seed": 1, KERNELS_SETTING: "a"})
    # nothing was made before: it may still change
    open_folder(folder, {"--seed": 2, KERNELS_SETTING: "a"})
    write_pictures(folder, range(2), PIXELS)
    open_folder(folder, {"--seed": 2, KERNELS_SETTING: "a"})
    assert capsys.readouterr().out == ""
    open_folder(folder, {"--seed": 2, KERNELS_SETTING: "b"})
    assert "may differ" in capsys.readouterr().out
    with mistake("", "--seed 3", "sample_dir"):
        open_folder(folder, {"--seed": 3, KERNELS_SETTING: "b"})
    with mistake("", "--seed none"):
        open_folder(folder, {KERNELS_SETTING: "b"})
    open_folder(folder, {"--seed": 2, KERNELS_SETTING: "a"})


def test_damaged_settings_are_one_line_to_the_user(folder):
    """Damage settings.json with pictures in the folder, and without: then it is replaced.
    A link is not followed.
    """
    precious = folder.parent / "precious"
    settings = folder / ".job" / "settings.json"
    precious.write_bytes(b"precious")
    settings.symlink_to(precious)
    for made in (False, True):
        open_folder(folder, {"--seed": made})
        assert (
            json.loads(settings.read_text()) == {"--seed": made}
            and precious.read_bytes() == b"precious"
        )
        assert not settings.is_symlink()
        if made:
            write_pictures(folder, range(2), PIXELS)
        settings.write_bytes(b"{")
    before = names(folder)
    with mistake("sample_dir", "settings.json") as caught:
        open_folder(folder, {"--seed": True})
    assert "\n" not in str(caught.value) and names(folder) == before


def test_nothing_of_the_users_is_deleted(folder):
    """Pictures of another origin end a first start; those that come later stay. Partial
    files of this job's form go.
    """
    own = folder / "2024-holiday.png"
    npz = npz_path(folder)
    own.write_bytes(b"mine")
    with mistake("sample_dir", "pictures"):
        open_folder(folder, {"--seed": 1})
    own.unlink()
    npz.write_bytes(b"another's")
    with mistake("sample_dir", ".npz"):
        open_folder(folder, {"--seed": 1})
    npz.unlink()
    open_folder(folder, {"--seed": 1})
    kept = [folder / name for name in (own.name, "000001.png", "7.png", ".holiday.png.7.part")]
    kept.append(npz.with_name(".x.npz.1.part"))
    for path in kept:
        path.write_bytes(b"mine")
    for path in (
        folder / ".000001.png.0123456789abcdef.part",
        npz.with_name(f".{npz.name}.0123456789abcdef.part"),
    ):
        path.write_bytes(b"half")
    before = {path: path.read_bytes() for path in kept}
    open_folder(folder, {"--seed": 1})
    assert {path: path.read_bytes() for path in kept} == before
    assert names(folder) == sorted([".job", *(path.name for path in kept if path.parent == folder)])
    assert names(folder.parent) == [".x.npz.1.part", folder.name]
    with mistake("", "--seed 2"):
        open_folder(folder, {"--seed": 2})
