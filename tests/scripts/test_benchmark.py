"""The ladder: every rung adds one thing, and the command runs where there is no GPU."""

import json
from dataclasses import asdict

import torch

from scripts import benchmark


def test_each_rung_adds_one_switch(monkeypatch):
    monkeypatch.setattr(benchmark.precision, "supports", lambda tier, device: True)
    rungs = [rung for rung in benchmark.ladder(torch.device("cuda"), ["fp16"]) if rung[2] is not None]
    changes = [{name for name, value in asdict(after[2]).items() if asdict(before[2])[name] != value} for before, after in zip(rungs, rungs[1:])]
    assert [len(change) for change in changes] == [1] * len(changes)
    assert set.union(*changes) == set(asdict(benchmark.Optimisations()))
    assert rungs[-1][2] == benchmark.Optimisations()  # the last is what users get


def test_on_a_cpu(tmp_path, run):
    done = run("scripts/benchmark.py", "--model", "DiT-Demo/2", "--only", "fp32", "--load", 0, "--window", 0.2, "--pictures", 1, "--device", "cpu",
               "--output", tmp_path / "log.json")
    assert done.returncode == 0, done.stderr
    log = json.loads((tmp_path / "log.json").read_text())
    [rung] = log["rungs"]
    assert rung["rung"] == "fp32" and 0 < rung["p10"] <= rung["ms"] <= rung["p90"] and 0 < rung["error"] < 1e-5
    assert log["torch"] == torch.__version__ and log["commit"] and "benchmark.py" in log["command"] and log["rows"] == 2


def test_comparing_with_the_compiler_needs_a_gpu(run):
    done = run("scripts/benchmark.py", "--compile", "default", "--device", "cpu")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--compile" in done.stderr
