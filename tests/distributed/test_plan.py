"""What `--parallel` refuses, and which plans are worth measuring."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT

from accel import options
from accel.kernels import FOLDER, version
from accel.options import DistributedOptions, UsageError
from accel.parallel import tokens
from accel.parallel.group import Group
from accel.parallel.plan import OFF, Plan, Planner, candidates, check

ONE_HOST = ["a"] * 4


@pytest.mark.parametrize(
    "text, message",
    (
        ("rows=8", "--parallel rows=8: needs 8 processes, there are 4"),
        ("tokens=3", "--parallel tokens=3: does not divide the 1024 tokens of a row; try 1 or 2 or 4"),
        (
            "tokens=4,exchange=ulysses",
            "--parallel tokens=4,exchange=ulysses: does not divide 6 heads; take exchange=kv",
        ),
        (
            "tokens=2,exchange=push",
            "--parallel exchange=push: writes into the memory of other GPUs over NVLink, which not all have here; take",
        ),
        (
            "rows=0",
            "--parallel rows=0: rows=0: give auto, off, rows=N,tokens=N,exchange=kv|push|ulysses|ring, or weights=N, or stages=",
        ),
        ("stages=4,patches=7", "--parallel patches=7: does not divide the 1024 tokens of a row"),
        ("stages=3,rows=2", "stages=3: give"),
        ("stages=4", "--parallel stages=4: the network has 3 blocks"),
        ("weights=4", "--parallel weights=4: does not divide 6 heads; try 1 or 2 or 3"),
        ("weights=2,rows=2", "weights=2: give"),
        ("row=2", "--parallel row=2: row=2: give"),
        ("rows=2,rows=4", "rows=2: give"),
        ("exchange=ring", "--parallel exchange=ring: exchange says how tokens are shared; add tokens=N"),
        ("rows=2,exchange=kv", "add tokens=N"),
        ("warmup=3", "--parallel warmup=3: warmup says how stages are shared; add stages=N"),
        ("tokens=2,exchange=nvlink", "exchange=nvlink: give"),
        ("fast", "--parallel fast: fast=: give"),
    ),
)
def test_refusals(text, message):
    with pytest.raises(UsageError) as error:
        plan = Plan(**DistributedOptions(parallel=text).mesh)
        check(plan, world=4, peers=False, tokens=1024, heads=6, depth=3)
    assert message in str(error.value)


def test_the_flag_knows_what_there_is():
    """accel/options.py is read before torch, so it has names of its own."""
    assert set(options.EXCHANGES) == set(tokens.EXCHANGES) and set().union(*options.PLANS) == set(Plan._fields)


@pytest.mark.parametrize("text", ("rows=1", "tokens=1,exchange=ring", "weights=1", "stages=1,patches=4"))
def test_a_mesh_of_one_is_no_mesh(text):
    """Whatever else it names: one process opens no collectives, and a GPU a picture waits for none."""
    group = Group(0, 1, 0, dist.HashStore())
    planner = Planner(group, "cpu", 1, 16, 64, 6, 3)
    network = object()
    plan = planner.wanted(DistributedOptions(parallel=text))
    assert plan == OFF and planner.parallel(network, plan) == (network, OFF)
    group.leave()


def test_a_choice_is_of_this_code(tmp_path):
    """Plans are kept between runs; faster kernels, or another exchange, are another choice."""
    planner = Planner(SimpleNamespace(tell=lambda name, value: ["a", "a"], host="a"), "cpu", 1, 16, 64, 6, 3)
    planner.network = planner.pieces = SimpleNamespace(parameters=lambda: iter([torch.zeros(72, 1)]), depth=3)
    assert f"code {version(FOLDER, ROOT / 'accel/parallel')}, torch" in planner.situation()
    (tmp_path / "kernel.cu").write_text("slow")
    before = version(tmp_path)
    (tmp_path / "kernel.cu").write_text("fast")
    assert version(tmp_path) != before


def test_refused_by_the_command():
    """In one line, with status 2, before torch is imported: an FID job has no picture to share, a compiled network no seams."""
    for arguments, message in (
        (["--parallel", "rows=2", "--num-fid-samples", "8"], "--parallel: has no meaning with --num-fid-samples"),
        (["--parallel", "rows=2", "--compile"], "--compile: compiles a whole network"),
    ):
        done = subprocess.run([sys.executable, str(ROOT / "sample_ddp.py"), *arguments], capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and message in done.stderr


def test_candidates():
    """Never one that gives no rank less to do than another with fewer GPUs or without an exchange."""

    def names(*arguments, exchanges=("kv", "ulysses")):
        return [str(plan) if plan != OFF else "off" for plan in candidates(*arguments, exchanges)]

    assert names(1, 2, 1024, 16, ["a"] * 2) == ["off", "rows=2"]
    assert names(1, 4, 1024, 16, ONE_HOST) == [
        "off",
        "rows=2",
        "rows=2,tokens=2,exchange=kv",
        "rows=2,tokens=2,exchange=ulysses",
    ]
    assert names(1, 4, 1024, 3, ONE_HOST) == ["off", "rows=2", "rows=2,tokens=2,exchange=kv"]  # 3 heads
    assert names(3, 4, 1024, 3, ONE_HOST) == [
        "off",
        "rows=2,tokens=2,exchange=kv",
    ]  # two of six rows on four are two on three
    assert names(1, 4, 1024, 3, ["a", "b", "b", "c"]) == ["off", "rows=2"]  # tokens stay inside a host
    assert names(1, 4, 1024, 3, ["a", "a", "b", "b"]) == ["off", "rows=2", "rows=2,tokens=2,exchange=kv"]
    assert names(1, 8, 64, 3, ["a"] * 8) == [
        "off",
        "rows=2",
        "rows=2,tokens=2,exchange=kv",
        "rows=2,tokens=4,exchange=kv",
    ]
