"""What `--parallel` refuses, which layouts are worth timing, and what a choice depends on."""

import json
import os
from collections import Counter

import pytest
import torch
from conftest import ROOT, fill

from accel.config import Grid
from accel.errors import UsageError
from accel.families.dit.network import DiT
from accel.kernels import FOLDER, version
from accel.network import Plain
from accel.ranks import Ranks, exchanges, layouts, placement, planner
from accel.ranks.distributed import DistributedRanks
from accel.ranks.placement import OFF, Layout, Placement
from accel.ranks.planner import (
    Work,
    candidates,
    check,
    choose_once,
    share_evaluations,
    situation,
)

ONE_HOST = ["a"] * 4
SIX_HEADS = 1024, 6  # tokens of a batch row, heads


def wanted(parallel, **more):
    """The layout of a grid at 512 px that ranks on one host share, as the command takes it."""
    grid = Grid.of("DiT-S/2", parallel=parallel, **more)
    grid.check()
    layout = grid.layout
    if layout:
        check(layout, *SIX_HEADS, ranks_of(4))
    return layout


def work(pictures=1, tokens=64, at_once=None, copies=None):
    """A run of guided evaluations."""
    return Work(pictures, at_once, copies or Counter({2: 10}), tokens, "fp32")


def ranks_of(world):
    """Rank 0 on a CPU. It is not connected."""
    cpu = torch.device("cpu")
    return Ranks(cpu) if world == 1 else DistributedRanks(0, world, device=cpu)


@pytest.mark.parametrize(
    "text, message",
    (
        ("rows=8", "--parallel rows=8: needs 8 processes, there are 4"),
        (
            "tokens=3",
            "--parallel tokens=3: does not divide the 1024 tokens of a row; try 1 or 2 or 4",
        ),
        (
            "tokens=4,exchange=ulysses",
            "exchange=ulysses: does not divide 6 heads; take exchange=kv",
        ),
        (
            "tokens=2,exchange=push",
            "--parallel exchange=push: needs NVLink between all these GPUs; take exchange=kv",
        ),
        (
            "rows=0",
            "--parallel rows=0: rows=0: give auto, off, "
            "or rows=N,tokens=N,exchange=kv|push|ulysses",
        ),
        ("row=2", "--parallel row=2: row=2: give"),
        ("rows=2,rows=4", "rows=2: give"),
        ("rows=2,exchange=kv", "exchange=kv: exchange says how tokens are shared; add tokens=N"),
        ("tokens=2,exchange=nvlink", "exchange=nvlink: give"),
        ("fast", "--parallel fast: fast=: give"),
        (
            "tokens=2,exchange=kv exact",
            "exchange=kv: keeps no float32 accuracy; take exchange=ulysses",
        ),
    ),
)
def test_refusals(text, message):
    parallel, _, precision = text.partition(" ")
    with pytest.raises(UsageError) as error:
        wanted(parallel, precision=precision or None)
    assert message in error.value.by_flags()


def test_what_is_wanted():
    """The layout that the user names; none where it is to be chosen; OFF where there is
    nothing to share.
    """
    assert wanted("rows=2,tokens=2") == Layout(2, 2, "kv")
    assert wanted("tokens=2", precision="exact") == Layout(1, 2, "ulysses")
    assert wanted("auto") is None and wanted("off") == OFF


def test_the_flag_knows_what_there_is():
    """accel/ranks/placement.py is read before torch, so it has names of its own."""
    assert set(placement.EXCHANGES) == set(exchanges.EXCHANGES)
    for name in Layout._fields:
        text = "tokens=2,exchange=push" if name == "exchange" else f"{name}=2"
        assert getattr(layouts.parse(text), name) != getattr(OFF, name)


@pytest.mark.parametrize("text", ("rows=1", "tokens=1,exchange=ulysses"))
def test_a_mesh_of_one_is_no_mesh(text):
    """Whatever else it names: one process opens no collectives, and a GPU a picture waits
    for none.
    """
    network = Plain(fill(DiT(input_size=16, hidden_size=24, depth=1, num_heads=6)))
    assert wanted(text) == OFF and share_evaluations(network, work(), ranks_of(1), OFF) == (
        network,
        Placement(),
    )


def test_a_choice_is_of_this_code_and_kept(tmp_path, monkeypatch, capsys):
    """Layouts are kept between runs; faster kernels, another exchange, or GPUs without
    NVLink are another choice.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = fill(DiT(input_size=16, hidden_size=24, depth=3, num_heads=6, num_classes=8))
    network = Plain(model)
    how = network, work(), (ranks := ranks_of(1))
    where = situation(*how)
    seen = {where}
    assert (
        f"code {version(FOLDER, ROOT / 'accel/ranks')}, torch" in where
        and network.describe() in where
    )
    text = situation(network, work(copies=Counter({2: 3, 1: 1})), ranks)
    assert (
        "1 batch rows each in 25% of evaluations, 2 batch rows each in 75% of evaluations" in text
    )
    chosen, reason = choose_once(*how)
    assert chosen == OFF and "ms per step estimated" in reason
    file = tmp_path / "dit" / "plans.json"
    assert json.loads(file.read_text()) == {where: ["off", reason]}
    assert choose_once(*how) == (OFF, f"{reason}; measured before on this machine ({file})")
    entries = [3, reason], ["rows=0", reason], ["off"], ["off", reason, 5], {}, None
    for damaged in ("{", "[]", "[" * 200_000, *(json.dumps({where: entry}) for entry in entries)):
        file.write_text(damaged)
        assert "measured before" not in choose_once(*how)[1], damaged[:80]
    file.unlink()
    file.mkdir()  # nothing can be written there
    capsys.readouterr()
    chosen, _ = choose_once(*how)
    printed = capsys.readouterr().out
    assert f"{file}: cannot be written, so each run chooses anew" in printed
    assert printed.count("\n") == 1 and "--parallel off" in printed
    file.rmdir()
    os.mkfifo(file)
    assert "measured before" not in choose_once(*how)[1] and file.is_fifo()
    for hosts, peers in ("aabb", False), ("abab", False), ("aaaa", False), ("aaaa", True):
        monkeypatch.setattr(ranks, "all_gather_object", lambda _, hosts=hosts: hosts)
        monkeypatch.setattr(ranks, "peers", lambda peers=peers: peers)
        seen.add(situation(*how))
    assert len(seen) == 5


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
    assert planner.milliseconds(network, work(tokens=4), ranks_of(1), OFF) == 13


def test_candidates():
    """Never one that gives no rank less to do than another with fewer GPUs or without an
    exchange.
    """

    def names(pictures, tokens, heads, hosts, **batch):
        found = candidates(work(pictures, tokens, **batch), heads, hosts, ("kv", "ulysses"))
        return [str(layout) if layout != OFF else "off" for layout in found]

    quartet = ["off", "rows=2", "rows=2,tokens=2,exchange=kv", "rows=2,tokens=2,exchange=ulysses"]
    assert names(1, 1024, 16, ["a"] * 2) == ["off", "rows=2"]
    assert names(1, 1024, 16, ONE_HOST) == quartet
    assert names(1, 1024, 3, ONE_HOST) == quartet[:3]  # 3 heads
    # Two of six batch rows on four ranks are two on three.
    assert names(3, 1024, 3, ONE_HOST) == ["off", "rows=2,tokens=2,exchange=kv"]
    assert names(1, 1024, 3, ["a", "b", "b", "c"]) == ["off", "rows=2"]  # tokens stay inside a host
    assert names(1, 1024, 3, ["a", "a", "b", "b"]) == quartet[:3]
    assert names(1, 64, 3, ["a"] * 8) == [*quartet[:3], "rows=2,tokens=4,exchange=kv"]
    # One picture at a time: a rank makes one alone, or a quarter of each of three.
    assert names(3, 1024, 3, ONE_HOST, at_once=1) == ["off", "rows=2,tokens=2,exchange=kv"]
    # Without guidance a picture is one batch row.
    assert names(1, 1024, 3, ["a"] * 2, copies=Counter({1: 10})) == [
        "off",
        "rows=1,tokens=2,exchange=kv",
    ]
