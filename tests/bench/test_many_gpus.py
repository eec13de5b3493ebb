"""Few pictures on many ranks, over gloo."""

import json

import torch
from jobs import run


def test_few_pictures_on_many_ranks(tmp_path):
    """Error of each layout against one rank; what the device implies is the demo in fp32."""
    flags = "--labels", 1, "--load", 0, "--window", 0.01, "--output", tmp_path / "out" / "x.json"
    text = run(2, "--device", "cpu", *flags, script="bench/many_gpus.py")
    assert "say nothing about GPUs" in text
    record = json.loads((tmp_path / "out" / "x.json").read_text())
    assert {(row["size"], row["tier"]) for row in record["plans"]} == {(128, "fp32")}
    one, *shared = record["plans"]
    assert (one["plan"], one["gpus"]) == ("one GPU", 1)
    assert {row["plan"] for row in shared} == {"rows=2", "tokens=2"}  # no layout of four ranks
    assert all(row["gpus"] == 2 and row["speedup"] == one["ms"] / row["ms"] for row in shared)
    assert all(row["error"] < 1e-5 for row in shared)
    assert (
        record["kind"] == "parallel"
        and record["gpu"] is None
        and record["torch"] == torch.__version__
    )
    assert record["command"].startswith("torchrun --nproc_per_node=2 ")
