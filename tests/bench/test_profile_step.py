"""The profile of warm steps: whole runs."""

import gzip
import json

import pytest

FEW = "--load", 0, "--window", 0.1, "--pictures", 1


def test_on_a_cpu(tmp_path, log):
    record, printed = log("profile_step", *FEW, "--device", "cpu", "--steps", 2)
    assert record["kind"] == "profile" and record["model"] == "DiT-Demo/2" and record["commit"]
    assert record["gpu"] is None and record["tier"] == "fp32" and record["batch_rows"] == 2
    timed = record["timed"]
    assert f"{timed['ms']:.2f} ms per step [{timed['p10']:.2f}, {timed['p90']:.2f}]" in printed
    functions = record["functions"]
    assert len(functions) == 10 and all(row["name"] in printed for row in functions)
    times = [row["ms"] for row in functions]
    assert times == sorted(times, reverse=True) and times[-1] > 0
    assert next(row for row in functions if row["name"] == "aten::addmm")["calls"] >= 6 * 4
    with gzip.open(tmp_path / "log.trace.json.gz") as file:
        names = [one["name"] for one in json.load(file)["traceEvents"]]
    assert names.count("aten::scaled_dot_product_attention") == 2 * 6  # two steps of six blocks


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["fp16", "fp32"])
def test_on_a_gpu(tier, log):
    """A captured step shows its kernels, as an eager one does."""
    flags = "--model", "DiT-Demo/2", "--precision", tier
    functions = log("profile_step", *FEW, *flags)[0]["functions"]
    assert not any(row["name"].startswith(("aten::", "cuda")) for row in functions)
    assert max(row["calls"] for row in functions) >= 6  # one of each block
