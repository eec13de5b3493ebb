"""Few pictures on many ranks, over gloo."""

import json

import torch
from jobs import run

from accel.parallel.layouts import Layout


def test_few_pictures_on_many_ranks(tmp_path):
    """Error of a plan against one rank; what the device implies is the demo in fp32."""
    plans = "--labels", 1, "--plans", "tokens=2,exchange=kv", "rows=4", "--load", 0, "--window", 0.01
    text = run(2, "--device", "cpu", *plans, "--output", tmp_path / "out" / "x.json", script="bench/many_gpus.py")
    assert "say nothing about GPUs" in text
    record = json.loads((tmp_path / "out" / "x.json").read_text())
    assert {(row["size"], row["tier"]) for row in record["plans"]} == {(128, "fp32")}
    one, two, auto = record["plans"]  # rows=4 needs more ranks than there are
    assert (one["plan"], one["gpus"], two["plan"], two["gpus"]) == ("one GPU", 1, str(Layout(1, 2, "kv")), 2)
    assert two["speedup"] == one["ms"] / two["ms"] and two["error"] < 1e-5
    assert auto["plan"] == "auto" and auto["chosen"]
    assert record["kind"] == "parallel" and record["gpu"] is None and record["torch"] == torch.__version__
    assert record["command"].startswith("torchrun --nproc_per_node=2 ")
