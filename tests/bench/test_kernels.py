"""Kernels alone: a GPU is needed, and what is asked for is timed, nothing else."""

import json
import sys

import pytest
import torch

from bench import kernels


def here(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["kernels.py", *map(str, args)])
    kernels.main()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_needs_a_gpu(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        here(monkeypatch, "--attention")
    assert stop.value.code == 2 and "there is none here" in capsys.readouterr().err


@pytest.mark.gpu
def test_what_is_asked_for_is_timed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernels.measure, "load_gpu", lambda seconds: None)
    here(monkeypatch, "--gemm", 1024, "--output", tmp_path / "log.json")
    log = json.loads((tmp_path / "log.json").read_text())
    assert {(row["layer"], row["m"]) for row in log["gemms"]} == {(name, 1024) for name in kernels.GEMMS}
    assert "attentions" not in log and all(row["error"] < 1e-2 and row["tflops"] > 0 for row in log["gemms"])
    here(monkeypatch, "--attention", "--backends", "flash", "--output", tmp_path / "log.json")
    log = json.loads((tmp_path / "log.json").read_text())
    assert len(log["attentions"]) == len(kernels.SHAPES) and all(row["error"] < 1e-2 for row in log["attentions"])
    with pytest.raises(SystemExit):
        here(monkeypatch)
    assert "nothing to time" in capsys.readouterr().err
