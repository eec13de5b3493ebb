"""The ladder: every rung adds one thing, and the command runs where there is no GPU."""

import json
import sys
import time
from dataclasses import asdict

import pytest
import torch
from conftest import fill

from accel.network import PlainDiT
from bench import measure, steps
from models import DiT_models


def test_each_rung_adds_one_switch(monkeypatch):
    monkeypatch.setattr(steps.precision, "supports", lambda tier, device: True)
    rungs = [rung for rung in steps.ladder(torch.device("cuda"), ["fp16"]) if rung[1] == "fp16"]
    changes = [
        {name for name, value in asdict(after[2]).items() if asdict(before[2])[name] != value}
        for before, after in zip(rungs, rungs[1:])
    ]
    assert [len(change) for change in changes] == [1] * len(changes)
    assert set.union(*changes) == set(asdict(steps.Optimisations()))
    assert rungs[-1][2] == steps.Optimisations()  # the last is what users get


def here(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["steps.py", "--device", "cpu", *map(str, args)])
    steps.main()


def test_on_a_cpu_the_demo_is_timed(tmp_path, run):
    flags = ["--only", "fp32", "--load", "0", "--window", "0.2", "--pictures", "1", "--device", "cpu", "--output"]
    done = run("bench/steps.py", *flags, tmp_path / "log.json")
    assert done.returncode == 0, done.stderr
    log = json.loads((tmp_path / "log.json").read_text())
    [rung] = log["rungs"]
    assert rung["rung"] == "fp32" and 0 < rung["p10"] <= rung["ms"] <= rung["p90"] and 0 < rung["error"] < 1e-5
    assert log["kind"] == "steps" and log["model"] == "DiT-Demo/2" and log["batch_rows"] == 2 and log["gpu"] is None
    assert log["torch"] == torch.__version__ and log["commit"] and log["date"] and "bench/steps.py" in log["command"]


@pytest.mark.parametrize(
    "flag,value", [("--vs", "compile,diffusers"), ("--vs", "diffusers,tensorrt"), ("--backends", "exact:gemm=cublas")]
)
def test_comparing_needs_a_gpu(flag, value, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        here(monkeypatch, flag, value)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and flag in error


def test_sweep(tmp_path, monkeypatch):
    """The sizes that are asked for, and no others."""
    flags = [
        "--sweep-pictures",
        "1",
        "3",
        "--sweep-sizes",
        "128",
        "64",
        "--pictures",
        "1",
        "--load",
        "0",
        "--window",
        "0.1",
        "--output",
    ]
    here(monkeypatch, *flags, tmp_path / "log.json")
    log = json.loads((tmp_path / "log.json").read_text())
    rows = log["sweep"]
    assert [(row["image_size"], row["pictures"]) for row in rows] == [(128, 1), (128, 3), (64, 1)]
    assert log["kind"] == "sweep" and log["image_size"] == 128
    assert all(row["rung"] == "fp32" and row["ms_a_picture"] == row["ms"] / row["pictures"] > 0 for row in rows)
    assert rows[2]["ms"] < rows[1]["ms"]


def test_decoder(tmp_path, monkeypatch):
    flags = ["--decoder", "--pictures", "2", "--image-size", "64", "--load", "0", "--window", "0.1", "--output"]
    here(monkeypatch, *flags, tmp_path / "log.json")
    [row] = json.loads((tmp_path / "log.json").read_text())["decoder"]
    assert row["arithmetic"] == "fp32" and row["error"] == 0 and row["refused"] is None
    assert 0 < row["p10"] <= row["ms"] <= row["p90"]


def test_a_judge_sees_a_worse_tier():
    """Eight pictures of two steps in place of 250: fp32 equals itself, a network with other weights does not."""
    judge = steps.Judge(0, torch.device("cpu"))
    judge.seeds, judge.diffusion, judge.options.labels = range(1), steps.create_diffusion("2"), tuple(range(8))
    judge.want = judge.pictures("fp32", None)
    same = judge.judge("fp32", None)
    assert same["contest"] and same["strict"] and same["pictures"] == 8 and same["worst"]["mae"] == 0
    other = PlainDiT(measure.random_network("DiT-Demo/2", 128, 8, "cpu"))
    worse = judge.judge("fp32", None, share=lambda network: other)
    assert not worse["contest"] and not worse["strict"] and worse["worst"]["psnr"] < 40


def test_diffusers_network_is_the_same_but_for_its_frequencies():
    model = fill(DiT_models["DiT-Demo/2"](num_classes=8))
    theirs = measure.DiffusersDiT(model, torch.float32, torch.device("cpu"))
    x, t, y = torch.randn(4, 4, 16, 16), torch.full((4,), 300), torch.tensor([1, 5, 8, 8])
    with torch.no_grad():
        want = model.forward_with_cfg(x, t, y, 4.0)
        assert 1e-3 < (theirs.forward_with_cfg(x, t, y, 4.0) - want).norm() / want.norm() < 0.5
        for block in theirs.transformer.transformer_blocks:
            block.norm1.emb.time_proj.downscale_freq_shift = 0
        assert torch.allclose(theirs.forward_with_cfg(x, t, y, 4.0), want, atol=1e-4)


def test_times_are_of_the_last_steps():
    """Steps before the load is over do not count, however slow they are."""
    count = iter(range(1000))

    def loop(on_step):
        for index in count:
            time.sleep(0.05 if index < 6 else 0.005)
            on_step(index, None)

    row = measure.time_steps(loop, torch.device("cpu"), load=0.3, window=0.1)
    assert 5 <= row["p10"] <= row["ms"] <= row["p90"] < 20 and row["steps"] >= 5


@pytest.mark.gpu
def test_alternatives_on_a_gpu(tmp_path, monkeypatch):
    backends = ["--backends", "exact:gemm=triton,attention=cublas", "fp16:gemm=cublaslt,attention=flash,adaln=triton"]
    flags = ["--only", "CUDA graph", *backends, "--vs", "compile,diffusers", "--load", 0, "--window", 0.1, "--output"]
    monkeypatch.setattr(sys, "argv", ["steps.py", "--model", "DiT-Demo/2", *map(str, [*flags, tmp_path / "log.json"])])
    steps.main()
    rungs = json.loads((tmp_path / "log.json").read_text())["rungs"]
    assert [rung["rung"] for rung in rungs] == [
        "fp16 + CUDA graph",
        "exact + gemm=triton,attention=cublas",
        "fp16 + gemm=cublaslt,attention=flash,adaln=triton",
        "fp16 + torch.compile default",
        "fp16 + diffusers' DiTTransformer2DModel",
    ]
    assert all(rung["ms"] > 0 for rung in rungs) and max(rung["error"] for rung in rungs[:3]) < 1e-2
    assert rungs[1]["error"] < 1e-5


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--output", "/proc/x.json"], "--output /proc/x.json: No such file"),
        (["--only", "graph"], "--only graph: no rung on cpu"),
        (["--sweep-sizes", "128", "100"], "--image-size 100: must be a multiple"),
        (["--model", "DiT-S/8", "--image-size", "144"], "--image-size 144: must be a multiple of 64"),
        (["--window", "-1"], "--window: -1: must be seconds"),
        (["--backends", "fp32:gemm=torch"], "fp32:gemm=torch: begin with one of fp16, bf16, exact"),
        (
            ["--backends", "exact:gemm=cublaslt"],
            "exact:gemm=cublaslt: exact takes gemm=auto|hopper|triton|cublas|torch",
        ),
        (["--backends", "fp16:graph=torch"], "fp16:graph=torch: fp16 takes adaln=…, embed_update=…, gemm=…"),
    ],
)
def test_refused_before_anything_is_measured(arguments, words, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        here(monkeypatch, *arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and words in error
