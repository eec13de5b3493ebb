"""What benchmarks share: they run as files and as modules, and say where their figures come from."""

import subprocess
import sys

import torch
from conftest import ROOT

from bench import measure
from models import DiT_models


def test_a_file_runs_as_its_module_does():
    for command in (["bench/steps.py"], ["-m", "bench.steps"]):
        done = subprocess.run([sys.executable, *command, "--model", "x"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("steps.py: argument --model: invalid choice: 'x'")


def test_provenance(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(ROOT / "bench" / "x.py"), "--flag"])
    about = measure.provenance(torch.device("cpu"), None)
    assert (
        about["gpu"] is None and about["torch"] == torch.__version__ and about["command"] == "python bench/x.py --flag"
    )
    assert about["commit"] and about["date"] and measure.provenance(torch.device("cpu"), "abc")["commit"] == "abc"
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert measure.provenance(torch.device("cpu"), None)["command"].startswith("torchrun --nproc_per_node=4 ")


def test_random_weights_make_no_zeros():
    """As a freshly initialised DiT does."""
    network = measure.random_network("DiT-S/8", 64, 4, "cpu")
    x, t, y = torch.randn(2, 4, 8, 8), torch.tensor([1, 900]), torch.tensor([0, 3])
    out = network(x, t, y)
    assert not DiT_models["DiT-S/8"](input_size=8, num_classes=4)(x, t, y).any()
    assert 0.1 < out.std() < 10 and torch.equal(out, measure.random_network("DiT-S/8", 64, 4, "cpu")(x, t, y))


def test_the_compilers_network_computes_the_same(monkeypatch):
    """The compiler aside, which a GPU tests: dtype in and out, and a copy of what a graph overwrites."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    network = measure.random_network("DiT-S/8", 64, 4, "cpu")
    x, t, y = torch.randn(4, 4, 8, 8), torch.full((4,), 300), torch.tensor([0, 3, 4, 4])
    want = network.forward_with_cfg(x, t, y, 4.0), network(x, t, y)
    compiled = measure.CompiledDiT(network, torch.bfloat16, "default")
    for got, expected in zip((compiled.forward_with_cfg(x, t, y, 4.0), compiled.forward(x, t, y)), want):
        assert got.dtype == torch.float32 and (got - expected).norm() / expected.norm() < 0.1
