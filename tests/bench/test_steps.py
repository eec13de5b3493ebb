"""The ladder: every rung adds one thing, and the command runs where there is no GPU."""

import json
from inspect import signature

import pytest
import torch
from forks import succeeds

from accel.families import constructor_of
from bench import harness, steps
from bench.rival import Rival

FEW = "--load", 0, "--window", 0.1


def test_each_rung_adds_one_switch(monkeypatch):
    monkeypatch.setattr(steps.precision, "supports", lambda tier, device: True)
    rungs = [rung for rung in steps.ladder(torch.device("cuda"), ["fp16"]) if rung[1] == "fp16"]
    changes = [
        {name for name, value in after[2].items() if before[2][name] != value}
        for before, after in zip(rungs, rungs[1:])
    ]
    assert [len(change) for change in changes] == [1] * len(changes)
    parameters = signature(harness.build).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
    # the last is what users get
    assert set.union(*changes) == set(defaults) and rungs[-1][2] == defaults


def test_on_a_cpu_the_demo_is_timed(log):
    record, _ = log("steps", *FEW, "--device", "cpu", "--pictures", 1, "--gate", 1)
    [rung] = record["rungs"]
    assert (
        rung["rung"] == "fp32"
        and 0 < rung["p10"] <= rung["ms"] <= rung["p90"]
        and 0 < rung["error"] < 1e-5
    )
    assert (
        record["kind"] == "steps"
        and record["model"] == "DiT-Demo/2"
        and record["weights"] == "dit.safetensors"
    )
    assert record["batch_rows"] == 2 and record["gpu"] is None


def test_a_judge_sees_a_worse_tier():
    """Eight pictures of two steps: fp32 equals itself, a network with other weights does not."""
    judge = steps.Judge(1, torch.device("cpu"), each=8, steps=2)
    same = judge.judge("fp32", {})
    assert (
        same["contest"] and same["strict"] and same["pictures"] == 8 and same["worst"]["mae"] == 0
    )
    cpu = torch.device("cpu")
    name = "DiT-Demo/2"
    model = harness.random_network(constructor_of(name), cpu, num_classes=8)
    other = harness.build(name, model, "fp32", cpu)
    worse = judge.judge("fp32", {}, share=lambda network: other)
    assert not worse["contest"] and not worse["strict"] and worse["worst"]["psnr"] < 40


def test_the_eager_rival_computes_the_model():
    model = constructor_of("DiT-Demo/2")().eval()
    torch.nn.init.normal_(model.final_layer.linear.weight)
    x = torch.randn(2, 4, 16, 16, dtype=torch.float64)
    t = torch.tensor([3.0, 500.0])
    y = torch.tensor([1, 8])
    with torch.no_grad():
        want = model(x.float(), t, y)
        got = Rival("eager", model, torch.float32, torch.device("cpu")).forward(x, t, y)
    assert got.dtype == torch.float64 and got.std() > 0.1
    torch.testing.assert_close(got, want.double(), rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["DiT-Demo/2", "Large-DiT-Demo/2"])
def test_rivals_on_a_gpu(model, log):
    flags = "--model", model, "--only", "exact", "CUDA graph", "--vs", "eager", "compile"
    rungs = {rung["rung"]: rung for rung in log("steps", *FEW, *flags)[0]["rungs"]}
    assert [*rungs] == [
        "exact",
        "fp16 + CUDA graph",
        "fp16 + eager",
        "fp16 + torch.compile default",
    ]
    assert all(rung["ms"] > 0 and rung["error"] < 1e-2 for rung in rungs.values())
    assert rungs["exact"]["error"] < 1e-5


@pytest.mark.gpu
def test_an_older_gpu(run, tmp_path):
    """Times and pictures of a process that sees an A100."""
    few = "--model", "DiT-Demo/2", "--seen-as", "8.0", "--load", 0, "--window", 0.2
    succeeds(
        run(
            "bench/steps.py",
            *few,
            "--only",
            "CUDA graph",
            "--gate",
            1,
            "--output",
            tmp_path / "out.json",
        )
    )
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["gpu"].endswith("as 8.0") and record["rungs"][0]["judged"]["contest"]
