"""The ladder: every rung adds one thing, and the command runs where there is no GPU."""

import json
import sys
from dataclasses import asdict

import pytest
import torch
from conftest import fill

from models import DiT_models
from scripts import benchmark


def test_each_rung_adds_one_switch(monkeypatch):
    monkeypatch.setattr(benchmark.precision, "supports", lambda tier, device: True)
    rungs = [rung for rung in benchmark.ladder(torch.device("cuda"), ["fp16"]) if rung[1] == "fp16"]
    changes = [
        {name for name, value in asdict(after[2]).items() if asdict(before[2])[name] != value}
        for before, after in zip(rungs, rungs[1:])
    ]
    assert [len(change) for change in changes] == [1] * len(changes)
    assert set.union(*changes) == set(asdict(benchmark.Optimisations())) - {"reset_once"}
    assert rungs[-1][2] == benchmark.Optimisations()  # the last is what users get


def test_on_a_cpu(tmp_path, run):
    done = run(
        "scripts/benchmark.py",
        "--model",
        "DiT-Demo/2",
        "--only",
        "fp32",
        "--load",
        0,
        "--window",
        0.2,
        "--pictures",
        1,
        "--device",
        "cpu",
        "--output",
        tmp_path / "log.json",
    )
    assert done.returncode == 0, done.stderr
    log = json.loads((tmp_path / "log.json").read_text())
    [rung] = log["rungs"]
    assert rung["rung"] == "fp32" and 0 < rung["p10"] <= rung["ms"] <= rung["p90"] and 0 < rung["error"] < 1e-5
    assert (
        log["torch"] == torch.__version__
        and log["commit"]
        and "benchmark.py" in log["command"]
        and log["batch_rows"] == 2
    )


@pytest.mark.parametrize(
    "flag,value", [("--compile", "default"), ("--vs", "compile,diffusers"), ("--vs", "diffusers,tensorrt")]
)
def test_comparing_needs_a_gpu(flag, value, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        benchmark_here(monkeypatch, flag, value)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and flag in error


def benchmark_here(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--model", "DiT-Demo/2", "--device", "cpu", *map(str, args)])
    benchmark.main()


def test_sweep(tmp_path, monkeypatch):
    benchmark_here(
        monkeypatch,
        "--sweep-pictures",
        1,
        3,
        "--sweep-sizes",
        128,
        64,
        "--pictures",
        1,
        "--load",
        0,
        "--window",
        0.1,
        "--output",
        tmp_path / "log.json",
    )
    log = json.loads((tmp_path / "log.json").read_text())
    assert [(row["image_size"], row["pictures"]) for row in log["sweep"]] == [(128, 1), (128, 3), (64, 1)] and log[
        "image_size"
    ] == 128
    assert all(row["rung"] == "fp32" and row["ms_a_picture"] == row["ms"] / row["pictures"] > 0 for row in log["sweep"])
    assert log["sweep"][2]["ms"] < log["sweep"][1]["ms"]


@pytest.mark.parametrize(
    "seconds,points", [(0.5, 50), (99.9, 50), (100, 50), (300 / 3**0.5, 25), (299.9, 0.015), (300, 0), (900, 0)]
)
def test_the_contests_points(seconds, points):
    assert benchmark.score(seconds) == pytest.approx(points, abs=0.001)


def test_contest(tmp_path, monkeypatch):
    benchmark_here(
        monkeypatch, "--contest", "--num-sampling-steps", 2, "--repeats", 1, "--output", tmp_path / "log.json"
    )
    [row] = json.loads((tmp_path / "log.json").read_text())["contest"]
    [run] = row["runs"]
    assert row["tier"] == "fp32" and row["points"] == 50 and row["seconds"] == run["total"] < run["process"]
    assert run["total"] == pytest.approx(run["load"] + run["sample"] + run["decode"] + run["save"], abs=0.03)


def test_diffusers_network_is_the_same_but_for_its_frequencies():
    model = fill(DiT_models["DiT-Demo/2"](num_classes=8))
    theirs = benchmark.DiffusersDiT(model.state_dict(), torch.float32, torch.device("cpu"))
    x, t, y = torch.randn(4, 4, 16, 16), torch.full((4,), 300), torch.tensor([1, 5, 8, 8])
    with torch.no_grad():
        want = model.forward_with_cfg(x, t, y, 4.0)
        assert 1e-3 < (theirs.forward_with_cfg(x, t, y, 4.0) - want).norm() / want.norm() < 0.5
        for block in theirs.model.transformer_blocks:
            block.norm1.emb.time_proj.downscale_freq_shift = 0
        assert torch.allclose(theirs.forward_with_cfg(x, t, y, 4.0), want, atol=1e-4)


def test_decoder(tmp_path, monkeypatch):
    benchmark_here(
        monkeypatch,
        "--decoder",
        "--pictures",
        2,
        "--image-size",
        64,
        "--load",
        0,
        "--window",
        0.1,
        "--output",
        tmp_path / "log.json",
    )
    [row] = json.loads((tmp_path / "log.json").read_text())["decoder"]
    assert (
        row["arithmetic"] == "fp32"
        and row["error"] == 0
        and row["refused"] is None
        and 0 < row["p10"] <= row["ms"] <= row["p90"]
    )
