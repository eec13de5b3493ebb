"""The profile of warm steps: whole runs."""

import gzip
import json

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from bench import profile_step

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


def on_host(name, start, length):
    return FunctionEvent(0, name, 1, start, start + length, use_device="cuda", stack=[])


def on_gpu(name, start, length, note=False):
    times = dict(start_us=start, end_us=start + length, stack=[])
    return FunctionEvent(
        0, name, 7, **times, use_device="cuda", device_type=DeviceType.CUDA, is_user_annotation=note
    )


def test_functions_of_a_gpu_are_its_kernels_and_copies():
    """Two steps of torch.profiler's events, with those of the host and the profiler's notes."""
    events = []
    for start in (0, 1000):
        events += [
            on_host("ProfilerStep*", start, 1000),
            on_host("aten::copy_", start + 20, 380),
            on_host("cudaStreamSynchronize", start + 40, 350),
            on_gpu("nvjet_sm90_hsh", start + 100, 300),
            on_gpu("attention", start + 400, 100),
            on_gpu("attention", start + 500, 100),
            on_gpu("Memcpy HtoD", start + 600, 2),
            on_gpu("ProfilerStep*", start, 1000, note=True),
        ]
    events = EventList(events, use_device="cuda")
    events._build_tree()
    assert profile_step.most_expensive(events, 2, torch.device("cuda")) == [
        dict(name="nvjet_sm90_hsh", ms=pytest.approx(0.3), calls=1),
        dict(name="attention", ms=pytest.approx(0.2), calls=2),
        dict(name="Memcpy HtoD", ms=pytest.approx(0.002), calls=1),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["fp16", "fp32"])
def test_on_a_gpu(tier, log):
    """A captured step shows its kernels, as an eager one does."""
    flags = "--model", "DiT-Demo/2", "--precision", tier
    functions = log("profile_step", *FEW, *flags)[0]["functions"]
    assert not any(row["name"].startswith(("aten::", "cuda")) for row in functions)
    assert max(row["calls"] for row in functions) >= 6  # one of each block
