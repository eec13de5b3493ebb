"""What an FID job records, and what it makes of a record that it finds."""

import json
import os
import re

import numpy as np
import pytest
from orders import order

from accel.errors import UsageError
from accel.fid.folder import CODE, Batches, npz_of, picture_name
from accel.fid.journal import Journal

PIXELS = np.zeros((2, 8, 8, 3), np.uint8)


@pytest.fixture
def folder(tmp_path):
    """The folder of a job as its lock leaves it."""
    (tmp_path / "samples" / "pictures" / ".job").mkdir(parents=True)
    return tmp_path / "samples" / "pictures"


def journal_of(folder, rank=0, world=1, wanted=8, independent=False):
    return Journal(folder, Batches(order(count=wanted, independent=independent), rank, world))


def begun(folder, settings, **how):
    """A journal of a job that has begun, and the batches that it finds finished."""
    journal = journal_of(folder, **how)
    journal.begin(settings)
    return journal, resumed(journal)


def resumed(journal):
    """The finished batches, after the journal has taken what it read itself for rank 0's."""
    journal.resume(journal.read())
    return journal.record.finished


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_names_are_on_disk_before_what_relies_on_them(folder, monkeypatch):
    """In the order of a power cut: the pictures, their folder, then the line, then the record's own name."""
    order, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: (order.append(os.readlink(f"/proc/self/fd/{handle}")), fsync(handle))
    )
    journal, finished = begun(folder, {"--seed": 1})
    assert order[1:] == [str(folder / ".job"), str(folder), str(folder.parent)] and finished == set()
    for batch in (0, 1):
        order.clear()
        journal.write(batch, PIXELS, "ab")
        written = sorted(re.sub(r"\.\w{16}\.part$", "", path) for path in order[:2])
        assert written == [str(folder / f".{2 * batch + i:06d}.png") for i in (0, 1)]
        assert order[2:] == [str(folder), str(journal.path), str(folder / ".job")]
    assert begun(folder, {"--seed": 1})[1] == {0, 1}


def test_another_start_needs_the_same_settings(folder, capsys):
    begun(folder, {"--seed": 1, CODE: "a"})
    begun(folder, {"--seed": 2, CODE: "a"})[0].write(0, PIXELS, "ab")  # nothing was made before: it may still change
    begun(folder, {"--seed": 2, CODE: "a"})
    assert capsys.readouterr().out == ""
    assert begun(folder, {"--seed": 2, CODE: "b"})[1] == {0}
    assert "may differ" in capsys.readouterr().out
    with pytest.raises(UsageError, match="--seed 3: .* begun with 2; use that, or another sample_dir"):
        begun(folder, {"--seed": 3, CODE: "b"})
    with pytest.raises(UsageError, match="--forecast plan of 4: .* begun with off;"):
        begun(folder, {"--seed": 2, CODE: "b", "--forecast": "plan of 4"})
    assert begun(folder, {"--seed": 2, CODE: "a"})[1] == {0}


def test_a_record_holds_the_state_after_a_batch_and_may_be_anyones_where_noise_is_independent(folder):
    settings = {"--seed": 1}
    for rank in (0, 1):
        begun(folder, settings, rank=rank, world=2)[0].write(rank, PIXELS, f"0{rank}")
    for rank in (0, 1):  # whoever reads reads for all
        journal, finished = begun(folder, settings, rank=rank, world=2)
        assert finished == {0, 1} and journal.states == {0: "00", 1: "01"}
    assert sorted(journal.digests) == [0, 1, 2, 3]
    (folder / picture_name(1)).unlink()  # of rank 1, whose pictures are 1 and 3
    assert journal_of(folder, rank=1, world=2).read().finished == {0}

    other = folder.with_name("other")
    (other / ".job").mkdir(parents=True)
    for rank in (0, 1):
        begun(other, settings, rank=rank, world=2, independent=True)[0].write(rank, PIXELS, None)
    assert begun(other, settings, independent=True)[1] == {0, 1}


def test_what_is_recorded_of_another_rank_needs_no_fresh_view(folder):
    for batch, state in ((0, "00"), (2, "02")):
        begun(folder, {"--seed": 1}, world=2)[0].write(batch, PIXELS, state)
    record = journal_of(folder, world=2).read()
    assert record.states == {0: "00", 2: "02"} and record.settings == (folder / ".job" / "settings.json").read_bytes()
    (folder / ".job" / "settings.json").unlink()  # not there yet in the view of rank 1's node
    other = journal_of(folder, rank=1, world=2)
    other.resume(record)
    other.write(1, PIXELS, "01")
    (folder / ".job" / "settings.json").write_bytes(record.settings)
    assert begun(folder, {"--seed": 1}, world=2)[1] == {0, 1, 2}


@pytest.mark.parametrize("tail", [b'{"batch": 1, "sha', b"\0\0\0", b"{}"])
def test_a_torn_last_line_is_cut_off(folder, tail):
    journal, _ = begun(folder, {"--seed": 1})
    journal.write(0, PIXELS, "ab")
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + tail)
    assert resumed(journal_of(folder)) == {0} and journal.path.read_bytes() == whole


@pytest.mark.parametrize(
    "change",
    [
        lambda line: b"[]\n",
        lambda line: b"{}\n",
        lambda line: b"not JSON\n",
        lambda line: b"\xff\xfe\n",
        lambda line: line.replace(b'"batch": 0', b'"batch": 1'),
        lambda line: line.replace(b'"generator": "ab"', b'"generator": "xy"'),
        lambda line: line.replace(b'"sha256": [', b'"sha256": ["0", '),
    ],
)
@pytest.mark.parametrize("position", [0, 1])
def test_a_wrong_line_is_one_line_to_the_user(folder, change, position):
    journal, _ = begun(folder, {"--seed": 1})
    for batch in (0, 1):
        journal.write(batch, PIXELS, "ab")
    lines = journal.path.read_bytes().splitlines(keepends=True)
    wrong = change(lines[0])
    assert wrong != lines[0]
    lines[position] = wrong
    journal.path.write_bytes(b"".join(lines))
    with pytest.raises(UsageError, match=f"rank-0000.jsonl, line {position + 1}: is damaged .* delete it") as caught:
        begun(folder, {"--seed": 1})
    assert "\n" not in str(caught.value)
    journal.path.unlink()  # the remedy
    assert begun(folder, {"--seed": 1})[1] == set()


def test_nothing_is_written_through_a_link(folder):
    """A precious file that somebody linked into .job stays, and so do other jobs' partial files beside the folder."""
    precious, archive = folder.parent / "precious", npz_of(folder)
    precious.write_bytes(b"precious\n")
    other = archive.with_name(".other.npz.0123456789abcdef.part")
    other.write_bytes(b"at work")
    (folder / ".job" / "settings.json").symlink_to(precious)
    journal, _ = begun(folder, {"--seed": 1})
    assert json.loads(journal.settings.read_text()) == {"--seed": 1} and not journal.settings.is_symlink()
    journal.path.symlink_to(precious)
    for attempt in (lambda: journal.write(0, PIXELS, "ab"), lambda: journal.resume(journal.record), journal.read):
        with pytest.raises(OSError, match="a link, not a file"):
            attempt()
    assert precious.read_bytes() == b"precious\n" and other.read_bytes() == b"at work"


def test_a_line_of_another_job_does_not_count(folder):
    """A process of a killed job that outlives it, and its successor with other settings."""
    survivor, _ = begun(folder, {"--seed": 1})
    survivor.write(0, PIXELS, "ab")
    for picture in folder.glob("*.png"):
        picture.unlink()
    with pytest.raises(UsageError, match="line 1: is damaged or another job's"):
        begun(folder, {"--seed": 2})


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", None])
def test_damaged_settings_are_one_line_to_the_user(folder, content):
    """Where pictures were made by them; else they do not matter."""
    for made in (False, True):
        journal, _ = begun(folder, {"--seed": made})
        if made:
            journal.write(0, PIXELS, "ab")
        journal.settings.unlink() if content is None else journal.settings.write_bytes(content)
    before = names(folder)
    with pytest.raises(UsageError, match="without a record of how they were made .*settings.json is missing") as caught:
        begun(folder, {"--seed": True})
    assert "\n" not in str(caught.value) and names(folder) == before


def test_nothing_of_the_users_is_deleted(folder):
    """Pictures of another origin end a first start; those that come later stay. Partial files of this job's form go."""
    own, npz = folder / "2024-holiday.png", npz_of(folder)
    own.write_bytes(b"mine")
    with pytest.raises(UsageError, match="holds pictures"):
        begun(folder, {"--seed": 1})
    own.unlink()
    npz.write_bytes(b"another's")
    with pytest.raises(UsageError, match="or its .npz is there"):
        begun(folder, {"--seed": 1})
    npz.unlink()
    begun(folder, {"--seed": 1})
    kept = [folder / name for name in (own.name, "000001.png", "7.png", ".holiday.png.7.part")]
    kept.append(npz.with_name(".x.npz.1.part"))
    for path in kept:
        path.write_bytes(b"mine")
    for path in (folder / ".000001.png.0123456789abcdef.part", npz.with_name(f".{npz.name}.0123456789abcdef.part")):
        path.write_bytes(b"half")
    before = {path: path.read_bytes() for path in kept}
    begun(folder, {"--seed": 1})  # before the first record
    assert {path: path.read_bytes() for path in kept} == before
    assert names(folder) == sorted([".job", *(path.name for path in kept if path.parent == folder)])
    assert names(folder.parent) == [".x.npz.1.part", folder.name]
    with pytest.raises(UsageError, match="--seed 2: .* begun with 1"):
        begun(folder, {"--seed": 2})
