"""What `--parallel` refuses, which layouts are worth timing, and what a choice depends on."""

import json
import os
from collections import Counter

import pytest
import torch
from conftest import ROOT, fill

from accel.errors import UsageError
from accel.families.dit.network import DiT
from accel.kernels import FOLDER, version
from accel.network import Plain
from accel.parallel import planner
from accel.parallel.groups import Groups
from accel.parallel.layouts import OFF, Layout, check
from accel.parallel.placement import Placement
from accel.parallel.planner import Work, candidates, choose_once, share_evaluations, situation
from accel.parallel.processes import Job
from accel.request import GridRequest

ONE_HOST = ["a"] * 4
SIX_HEADS = 1024, 6  # tokens of a batch row, heads


def wanted(parallel, precision=None):
    """The layout of a grid at 512 px that four ranks share, as the command takes it."""
    layout = GridRequest("DiT-S/2", parallel=parallel).layout
    if layout:
        check(layout, *SIX_HEADS, 4, precision)
    return layout


def work(pictures=1, tokens=64, at_once=None, copies=None):
    """A run of guided evaluations."""
    return Work(pictures, at_once, copies or Counter({2: 10}), tokens, "fp32")


def groups_of(world):
    return Groups(Job(0, world), torch.device("cpu"))


@pytest.mark.parametrize(
    "text, message",
    (
        ("rows=8", "--parallel rows=8: needs 8 processes, there are 4"),
        ("tokens=3", "--parallel tokens=3: does not divide the 1024 tokens of a row; try 1 or 2 or 4"),
        ("tokens=4 exact", "--parallel tokens=4: does not divide 6 heads, as exact does; try 1 or 2 or 3"),
        ("rows=0", "--parallel rows=0: rows=0: give auto, off, rows=N,tokens=N or weights=N"),
        ("weights=4", "--parallel weights=4: does not divide 6 heads; try 1 or 2 or 3"),
        ("weights=2,rows=2", "weights=2: give"),
        ("row=2", "--parallel row=2: row=2: give"),
        ("rows=2,rows=4", "rows=2: give"),
        ("fast", "--parallel fast: fast=: give"),
    ),
)
def test_refusals(text, message):
    parallel, _, precision = text.partition(" ")
    with pytest.raises(UsageError) as error:
        wanted(parallel, precision)
    assert message in error.value.by_flags()


def test_what_is_wanted():
    """The layout that the user names; none where it is to be chosen; OFF where there is nothing to share."""
    assert wanted("rows=2,tokens=2") == Layout(2, 2) and wanted("weights=2") == Layout(weights=2)
    assert wanted("auto") is None and wanted("off") == OFF


@pytest.mark.parametrize("text", ("rows=1", "tokens=1", "weights=1"))
def test_a_mesh_of_one_is_no_mesh(text):
    """Whatever else it names: one process opens no collectives, and a GPU a picture waits for none."""
    network = Plain(fill(DiT(input_size=16, hidden_size=24, depth=1, num_heads=6)))
    assert wanted(text) == OFF and share_evaluations(network, work(), groups_of(1), OFF) == (network, Placement())


def test_a_choice_is_of_this_code_and_kept(tmp_path, monkeypatch):
    """Layouts are kept between runs; faster kernels, or another exchange, are another choice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = fill(DiT(input_size=16, hidden_size=24, depth=3, num_heads=6, num_classes=8))
    network = Plain(model)
    how = network, work(), groups_of(1)
    where = situation(*how)
    assert f"code {version(FOLDER, ROOT / 'accel/parallel')}, torch" in where and network.describe() in where
    chosen, reason = choose_once(*how)
    assert chosen == OFF and "ms a step estimated" in reason
    file = tmp_path / "dit" / "plans.json"
    assert json.loads(file.read_text()) == {where: ["off", reason]}
    assert choose_once(*how) == (OFF, f"{reason}; measured before on this machine ({file})")
    entries = [3, reason], ["rows=0", reason], ["off"], ["off", reason, 5], {}, None
    for damaged in ("{", "[]", "[" * 200_000, *(json.dumps({where: entry}) for entry in entries)):
        file.write_text(damaged)
        assert "measured before" not in choose_once(*how)[1], damaged[:80]
    file.unlink()
    os.mkfifo(file)
    assert "measured before" not in choose_once(*how)[1]
    assert file.is_fifo()
    file.unlink()
    (tmp_path / "kernel.cu").write_text("slow")
    before = version(tmp_path)
    (tmp_path / "kernel.cu").write_text("fast")
    assert version(tmp_path) != before


class Counted(Plain):
    """A network that counts time: three for an evaluation and one for each of its blocks."""

    time = 0

    def forward_blocks(self, h, *how):
        Counted.time += 3 + self.depth
        return super().forward_blocks(h, *how)


def test_an_estimate_is_of_the_whole_network(monkeypatch):
    """Two and six of its blocks are timed, here by a clock that no other process disturbs."""

    def counted(step, device):
        before = Counted.time
        step()
        return Counted.time - before

    monkeypatch.setattr(planner, "_milliseconds", counted)
    network = Counted(fill(DiT(input_size=4, hidden_size=24, depth=10, num_heads=6)))
    assert planner.milliseconds(network, work(tokens=4), groups_of(1), OFF) == 13


def test_candidates():
    """Never one that gives no rank less to do than another with fewer GPUs or without an exchange."""

    def names(pictures, tokens, hosts, heads=0, **batch):
        found = candidates(work(pictures, tokens, **batch), hosts, heads)
        return [str(layout) if layout != OFF else "off" for layout in found]

    three = ["off", "rows=2", "rows=2,tokens=2"]
    assert names(1, 1024, ["a"] * 2) == ["off", "rows=2"]
    assert names(1, 1024, ONE_HOST) == names(1, 1024, ONE_HOST, heads=16) == three
    assert names(1, 1024, ONE_HOST, heads=3) == ["off", "rows=2"]  # which two ranks cannot divide
    # Two of six batch rows on four ranks are two on three.
    assert names(3, 1024, ONE_HOST) == ["off", "rows=2,tokens=2"]
    assert names(1, 1024, ["a", "b", "b", "c"]) == ["off", "rows=2"]  # tokens stay inside a host
    assert names(1, 1024, ["a", "a", "b", "b"]) == three
    assert names(1, 64, ["a"] * 8) == [*three, "rows=2,tokens=4"]
    # One picture at a time: a rank makes one alone, or a quarter of each of three.
    assert names(3, 1024, ONE_HOST, at_once=1) == ["off", "rows=2,tokens=2"]
    # Without guidance a picture is one batch row.
    assert names(1, 1024, ["a"] * 2, copies=Counter({1: 10})) == ["off", "rows=1,tokens=2"]
