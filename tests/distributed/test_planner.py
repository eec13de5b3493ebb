"""What `--parallel` refuses, which layouts are worth timing, and what a choice depends on."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, fill

from accel import options
from accel.errors import UsageError
from accel.kernels import FOLDER, version
from accel.network import Plain
from accel.options import DistributedOptions
from accel.parallel.exchanges import EXCHANGES
from accel.parallel.planner import OFF, Layout, Planner, candidates
from accel.parallel.processes import Job
from models import DiT

ONE_HOST = ["a"] * 4
MODEL = fill(DiT(input_size=64, hidden_size=24, depth=3, num_heads=6, num_classes=8))  # 1024 tokens


def planner(parallel, job, model=MODEL, **more):
    side = 8 * model.x_embedder.img_size[0]
    return Planner(
        job, DistributedOptions(parallel=parallel, labels=(1,), image_size=side, device="cpu", **more), model
    )


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
            "--parallel exchange=push: needs NVLink between all these GPUs; take exchange=kv",
        ),
        (
            "rows=0",
            "--parallel rows=0: rows=0: give auto, off, rows=N,tokens=N,exchange=kv|push|ulysses, or weights=N",
        ),
        ("weights=4", "--parallel weights=4: does not divide 6 heads; try 1 or 2 or 3"),
        ("weights=2,rows=2", "weights=2: give"),
        ("row=2", "--parallel row=2: row=2: give"),
        ("rows=2,rows=4", "rows=2: give"),
        ("exchange=kv", "--parallel exchange=kv: exchange says how tokens are shared; add tokens=N"),
        ("rows=2,exchange=kv", "add tokens=N"),
        ("tokens=2,exchange=nvlink", "exchange=nvlink: give"),
        ("fast", "--parallel fast: fast=: give"),
    ),
)
def test_refusals(text, message):
    with pytest.raises(UsageError) as error:
        planner(text, Job(0, 4)).wanted()
    assert message in str(error.value)


@pytest.mark.parametrize(
    "text, tier, message",
    (
        ("tokens=2,exchange=kv", "exact", "--parallel exchange=kv: keeps no float32 accuracy; take exchange=ulysses"),
        ("weights=2", "exact", "--parallel weights=2: sums in the GEMMs' precision; take --precision fp32, tf32"),
    ),
)
def test_refusals_of_a_tier(text, tier, message):
    with pytest.raises(UsageError) as error:
        planner(text, Job(0, 4), precision=tier).wanted()
    assert message in str(error.value)


def test_what_is_wanted():
    """The layout that the user names; none where it is to be chosen; OFF where there is nothing to share."""
    assert planner("rows=2,tokens=2", Job(0, 4)).wanted() == Layout(2, 2, "kv")
    assert planner("tokens=2", Job(0, 4), precision="exact").wanted() == Layout(1, 2, "ulysses")
    assert planner("auto", Job(0, 4)).wanted() is None
    assert planner("off", Job(0, 4)).wanted() == planner("auto", Job()).wanted() == OFF


def test_the_flag_knows_what_there_is():
    """accel/options.py is read before torch, so it has names of its own."""
    assert set(options.EXCHANGES) == set(EXCHANGES)
    for name in Layout._fields:
        layout = "tokens=2,exchange=kv" if name == "exchange" else f"{name}=2"
        assert name in DistributedOptions(parallel=layout).mesh


@pytest.mark.parametrize("text", ("rows=1", "tokens=1,exchange=ulysses", "weights=1"))
def test_a_mesh_of_one_is_no_mesh(text):
    """Whatever else it names: one process opens no collectives, and a GPU a picture waits for none."""
    alone, network = planner(text, Job()), Plain(MODEL)
    assert alone.wanted() == OFF and alone.parallel(network, OFF) == (network, OFF)


def test_a_choice_is_of_this_code_and_kept(tmp_path, monkeypatch):
    """Layouts are kept between runs; faster kernels, or another exchange, are another choice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = fill(DiT(input_size=16, hidden_size=24, depth=3, num_heads=6, num_classes=8))
    alone, network = planner("auto", Job(), model), Plain(model)
    situation = alone.situation(network)
    assert f"code {version(FOLDER, ROOT / 'accel/parallel')}, torch" in situation and network.describe() in situation
    chosen, reason = alone.choose_once(network)
    assert chosen == OFF and "ms a step estimated" in reason
    file = tmp_path / "dit" / "plans.json"
    assert json.loads(file.read_text()) == {situation: [list(OFF), reason]}
    assert alone.choose_once(network) == (OFF, f"{reason}; measured before on this machine ({file})")
    layouts = 3, [], [1, 1, "kv"], ["1", 1, "kv", 1], [1, 1, "mail", 1], [0, 1, "kv", 1], [1, 1, "kv", 1, 1]
    entries = [*([layout, reason] for layout in layouts), [list(OFF)], [list(OFF), 5], {}, "x"]
    for damaged in ("{", "[]", "[" * 200_000, *(json.dumps({situation: entry}) for entry in entries)):
        file.write_text(damaged)
        assert "measured before" not in alone.choose_once(network)[1], damaged[:80]
    file.unlink()
    os.mkfifo(file)
    assert "measured before" not in alone.choose_once(network)[1]
    assert file.is_fifo()
    file.unlink()
    (tmp_path / "kernel.cu").write_text("slow")
    before = version(tmp_path)
    (tmp_path / "kernel.cu").write_text("fast")
    assert version(tmp_path) != before


def test_refused_by_the_command():
    """In one line, with status 2, before torch is imported: an FID job has no picture to share."""
    arguments = ["--parallel", "rows=2", "--num-fid-samples", "8"]
    done = subprocess.run([sys.executable, str(ROOT / "sample_ddp.py"), *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "--parallel: has no meaning with --num-fid-samples" in done.stderr


def test_candidates():
    """Never one that gives no rank less to do than another with fewer GPUs or without an exchange."""

    def names(*arguments, exchanges=("kv", "ulysses")):
        return [str(layout) if layout != OFF else "off" for layout in candidates(*arguments, exchanges)]

    quartet = ["off", "rows=2", "rows=2,tokens=2,exchange=kv", "rows=2,tokens=2,exchange=ulysses"]
    assert names(1, 2, 1024, 16, ["a"] * 2) == ["off", "rows=2"]
    assert names(1, 4, 1024, 16, ONE_HOST) == quartet
    assert names(1, 4, 1024, 3, ONE_HOST) == quartet[:3]  # 3 heads
    # Two of six batch rows on four ranks are two on three.
    assert names(3, 4, 1024, 3, ONE_HOST) == ["off", "rows=2,tokens=2,exchange=kv"]
    assert names(1, 4, 1024, 3, ["a", "b", "b", "c"]) == ["off", "rows=2"]  # tokens stay inside a host
    assert names(1, 4, 1024, 3, ["a", "a", "b", "b"]) == quartet[:3]
    assert names(1, 8, 64, 3, ["a"] * 8) == [*quartet[:3], "rows=2,tokens=4,exchange=kv"]
