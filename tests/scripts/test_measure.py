"""What measures many processes, and the script that runs all measurements: what they refuse, and that a stopped run goes on."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from accel.parallel.planner import Layout
from scripts import benchmark, measure_ddp, profiling, score_demo

PYTHON = """#!/bin/bash
case "$*" in
-c*device_count*) echo 0 ;;
-c*) echo fp32 ;;
*)
  while [[ $1 != --output ]]; do shift; done
  echo "${2##*/}" >>started
  [[ $2 == *verify ]] && { mkdir -p "$2"; echo '{}' >"$2/verify.json"; exit 3; }
  echo '{"half": ' >"$2"
  [[ -e die && $2 == *ladder.json ]] && kill -KILL $PPID
  echo '{}' >"$2" ;;
esac
"""


def test_a_measurement_that_was_cut_short_is_made_again(tmp_path):
    """The scripts write what they have as they go, so a file that is there need not be whole. python and torchrun are stand-ins: this is about the shell."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "measure.sh").write_text((ROOT / "scripts" / "measure.sh").read_text())
    for name in ("python", "torchrun"):
        (tmp_path / name).write_text(PYTHON)
        (tmp_path / name).chmod(0o755)

    def measure():
        done = subprocess.run(
            ["bash", "scripts/measure.sh", "out"],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
        )
        started = (tmp_path / "started").read_text().split() if (tmp_path / "started").exists() else []
        (tmp_path / "started").unlink(missing_ok=True)
        return done, started

    (tmp_path / "die").touch()
    done, started = measure()
    assert done.returncode < 0 and started == ["profile-baseline.json", "profile-fast.json", "ladder.json"]
    (tmp_path / "die").unlink()
    done, started = measure()
    assert done.returncode == 0 and started == [
        "ladder.json",
        "sweep.json",
        "contest.json",
        "verify",
        "link.json",
        "parallel.json",
        "ddp.json",
    ], done.stderr
    assert "--gate" not in done.stdout  # sixty-four pictures a plan are an hour of a CPU
    assert "report.py" in done.stdout and not list((tmp_path / "out").rglob("*.unfinished"))
    assert measure()[1] == []  # all are whole


def test_few_pictures_on_many_ranks(tmp_path):
    """By the name that benchmark.py gives it. Over gloo, the demo: error and traffic of a plan beside one rank."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            "scripts/benchmark.py",
            "--parallel",
            "--model",
            "DiT-Demo/2",
            "--labels",
            "1",
            "--plans",
            "tokens=2,exchange=kv",
            "rows=4",
            "--load",
            "0",
            "--window",
            "0.01",
            "--device",
            "cpu",
            "--output",
            str(tmp_path / "out" / "x.json"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0 and "say nothing about GPUs" in done.stdout, done.stderr
    record = json.loads((tmp_path / "out" / "x.json").read_text())
    assert {(row["size"], row["tier"]) for row in record["rows"]} == {
        (128, "fp32")
    }  # what the model and the device imply
    one, two, auto = record["rows"]  # rows=4 needs more ranks than there are
    assert (one["plan"], one["gpus"], two["plan"], two["gpus"]) == (
        "one GPU",
        1,
        str(Layout(1, 2, "kv")),
        2,
    ) and "--parallel" in record["command"]
    assert (
        two["speedup"] == one["ms"] / two["ms"]
        and two["error"] < 1e-5
        and (two["collectives"], two["bytes"]) == (1, 2 * 2 * 32 * 216 * 4)
    )
    assert auto["plan"] == "auto" and auto["chosen"] and record["gpu"] is None and record["torch"] == torch.__version__


@pytest.mark.parametrize(
    "main, arguments, words",
    [
        (benchmark.main, ["--parallel"], "torchrun"),
        (
            benchmark.main,
            ["--model", "DiT-Demo/2", "--device", "cpu", "--output", "/proc/x.json"],
            "--output /proc/x.json: cannot write",
        ),
        (measure_ddp.main, ["--output", "/proc/x.json"], "--output /proc/x.json: cannot write"),
        (measure_ddp.main, ["--gpus", "0"], "--gpus: 0: must be at least 1"),
        (measure_ddp.main, ["--model", "DiT-Demo"], "--model DiT-Demo: unknown"),
        (measure_ddp.main, ["--image-size", "100"], "--image-size 100: must be a multiple"),
        (
            benchmark.main,
            ["--model", "DiT-Demo/2", "--device", "cpu", "--only", "reset"],
            "--only reset: no rung on cpu",
        ),
        (
            benchmark.main,
            ["--model", "DiT-Demo/2", "--device", "cpu", "--sweep-sizes", "128", "100"],
            "--image-size 100: must be a multiple",
        ),
        (
            benchmark.main,
            ["--model", "DiT-S/8", "--device", "cpu", "--image-size", "144"],
            "--image-size 144: must be a multiple of 64",
        ),
        (
            benchmark.main,
            ["--parallel", "--model", "DiT-S/8", "--image-size", "144"],
            "--image-size 144: must be a multiple of 64",
        ),
        (
            profiling.main,
            ["--model", "DiT-S/8", "--device", "cpu", "--image-size", "144"],
            "--image-size 144: must be a multiple of 64",
        ),
        (profiling.main, ["--load", "nan"], "--load: nan: must be seconds"),
        (benchmark.main, ["--window", "-1"], "--window: -1: must be seconds"),
        (score_demo.main, ["--grid", "/proc/x.png"], "--grid /proc/x.png: cannot write"),
    ],
)
def test_refused_before_anything_is_measured(main, arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and words in error


def test_a_rank_s_complaint_is_told_in_its_line(tmp_path, monkeypatch, capsys):
    """By itself, the model's own size and, on the CPU, a tier that runs there."""
    started, launch = [], measure_ddp.launch
    monkeypatch.setattr(
        measure_ddp, "launch", lambda *words: [started.append(words), launch(1, *words[1:], "--precision", "fp8")]
    )
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "x.py",
            "--gpus",
            "2",
            "--model",
            "DiT-Demo/2",
            "--ckpt",
            "x",
            "--vae",
            "x",
            "--output",
            str(tmp_path / "x.json"),
        ],
    )
    with pytest.raises(SystemExit) as stop:
        measure_ddp.main()
    error = capsys.readouterr().err
    assert (
        stop.value.code == 2
        and error.count("\n") == 1
        and "measure_ddp.py: sample_ddp.py: argument --precision: invalid choice: 'fp8'" in error
    )
    [words] = started
    flags = dict(zip(words[1::2], words[2::2]))
    assert (flags["--image-size"], flags["--precision"]) == (128, "fp16" if torch.cuda.is_available() else "fp32")
