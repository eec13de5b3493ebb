"""Steps: each rung adds one optimisation, errors and pictures are judged, a profile tells kinds
of work apart, ranks share a batch.
"""

import gzip
import json
import time
from argparse import Namespace

import pytest
import torch
from jobs import run as run_ranks
from networks import opened

from accel.config.options import Options
from accel.pipeline import Pipeline
from accel.runtime.network import EagerNetwork
from accel.runtime.precision import preserve_switches
from bench import steps, traces

CPU = torch.device("cpu")
DEMO = "--model", "DiT-Demo/2", "--device", "cpu", "--pictures", 1
FEW = "--load", 0, "--window", 0.1


@pytest.fixture
def demo():
    """A run of the demo in two steps."""
    options = Options(
        model="DiT-Demo/2", precision="fp32", num_sampling_steps=2, output_type="latent"
    )
    with preserve_switches():
        yield opened(options, CPU)


def model_of(run):
    return Pipeline.load(run).network.model


# ---- the ladder ----


@pytest.mark.parametrize("tier, count", [("fp16", 7), ("exact", 6)])
def test_each_rung_adds_one_optimisation(tier, count, demo):
    """The last rung is the network that users get."""
    rungs = list(steps.rungs_of(["fp32", tier], CPU))
    assert len(rungs) == 1 + count
    assert rungs[0] == ("fp32", "fp32", {})
    for (_, _, before), (_, _, after) in zip(rungs[1:], rungs[2:]):
        changed = {name.removeprefix("last_") for name in after if after[name] != before.get(name)}
        assert len(changed) == 1
    model = model_of(demo)
    on_cpu = {} if tier == "fp16" else dict(gemm="torch", attention="torch")
    slow = steps.build(demo, model, tier, **rungs[1][2] | on_cpu)
    fast, default = (steps.build(demo, model, tier, **each) for each in (rungs[-1][2], {}))
    assert not slow.precomputes_conditioning and not slow.captures
    assert (
        fast.precomputes_conditioning
        and fast.captures
        and default.precomputes_conditioning
        and default.captures
    )
    assert {*rungs[-1][2].values()} == {True, "auto"}


@pytest.mark.parametrize("tier, least, most", [("fp16", 1e-5, 1e-3), ("exact", 1e-8, 2e-6)])
def test_a_switch_reaches_its_op(demo, tier, least, most):
    """Reference implementations run on a CPU; a GPU's kernel of any op raises an error there."""
    model = model_of(demo)
    plain = dict.fromkeys(("adaln", "last_adaln", "attention", "gemm"), "torch")
    error = steps.errors_of(model, demo)
    assert least < error(steps.build(demo, model, tier, **plain)) < most
    for name in plain:
        kernel = "triton" if "adaln" in name else "hopper"
        with pytest.raises((AssertionError, RuntimeError, ValueError)):
            error(steps.build(demo, model, tier, **plain | {name: kernel}))


def test_the_demo_on_a_cpu(tmp_path, log):
    record, printed = log("ladder", *DEMO, *FEW, "--profile")
    [rung] = record["rungs"]
    assert rung["rung"] == "fp32" and 0 < rung["p10"] <= rung["ms"] <= rung["p90"]
    assert 0 < rung["error"] < 1e-5 and json.loads(printed.splitlines()[0]) == rung
    named = {name: record[name] for name in ("kind", "model", "weights", "image_size", "gpu")}
    assert named == dict(
        kind="steps", model="DiT-Demo/2", weights="dit.safetensors", image_size=128, gpu=None
    )
    assert (record["pictures"], record["batch_rows"], record["load_seconds"]) == (1, 2, 0)
    assert record["torch"] == torch.__version__
    shape = dict(depth=6, width=216, tokens=64, patch=2, channels=4, outputs=8)
    assert record["shape"].items() >= shape.items()
    assert record["ceilings"]["tflops"]["fp32"] > 0 and record["ceilings"]["gb_s"] > 0
    [row] = record["profiles"]
    functions = row["functions"]
    times = [function["ms"] for function in functions]
    assert len(times) == 10 and times == sorted(times, reverse=True) and times[-1] > 0
    linear = next(function for function in functions if function["name"] == "aten::addmm")
    # six blocks of four layers, with the embeddings' and the head's
    assert linear["calls"] == 34 and linear["kind"] == "GEMM"
    assert row["kinds"]["attention"]["calls"] >= 6
    assert row["kinds"]["GEMM"]["ms"] >= linear["ms"] > row["kinds"]["attention"]["ms"] > 0
    with gzip.open(tmp_path / row["trace"]) as file:
        names = [event["name"] for event in json.load(file)["traceEvents"]]
    assert names.count("aten::scaled_dot_product_attention") == steps.RECORDED * 6


def test_a_judge_sees_another_arithmetic(demo):
    """fp32 makes the same eight pictures again; fp16 makes others, within the criterion of close
    pictures.
    """
    judge = steps.judge_of(1, demo, count=8)
    same = judge("fp32")
    assert same["pictures"] == 8 and same["worst"]["mae"] == 0 and same["contest-2025-06"]
    half = judge("fp16", adaln="torch", last_adaln="torch", attention="torch", gemm="torch")
    assert 0 < half["worst"]["mae"] < 0.01 and 40 < half["worst"]["psnr"] < 100
    assert half["close"] and half["worst"]["ssim"] < 1


# ---- rivals ----


def test_eager_computes_the_same(log):
    """The compiler is tested on a GPU."""
    record, _ = log("rivals", *DEMO, *FEW, "--vs", "eager")
    ours, eager = record["rungs"]
    assert (ours["rung"], eager["rung"]) == ("fp32", "fp32 + eager")
    assert 0 < eager["error"] == ours["error"] < 1e-5 and eager["ms"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["DiT-Demo/2", "Large-DiT-Demo/2"])
def test_rivals_on_a_gpu(model, log):
    flags = "--model", model, "--precision", "exact", "fp16", "--vs", "eager", "default"
    rungs = {rung["rung"]: rung for rung in log("rivals", *FEW, *flags)[0]["rungs"]}
    own = "exact + CUDA graph", "fp16 + CUDA graph"
    assert tuple(rungs) == (*own, "fp16 + eager", "fp16 + torch.compile default")
    assert all(rung["ms"] > 0 and rung["error"] < 1e-2 for rung in rungs.values())
    assert rungs["exact + CUDA graph"]["error"] < 1e-5


# ---- time ----


def test_times_are_of_the_last_steps(monkeypatch, demo):
    """Steps before the load is over do not count, however slow they are. A run is repeated."""
    count = 0
    clock = 0.0  # seconds, without the machine's other work
    monkeypatch.setattr(time, "perf_counter", lambda: clock)

    class Network(EagerNetwork):
        def forward_tokens(self, x, t, y, run=None):
            nonlocal clock, count
            clock += 0.2 if count < 3 else 0.05 if 10 < count < 35 else 0.005
            count += 1
            return torch.zeros(2, 64, 2 * 2 * 8)

    sample = steps.sampling(Network(model_of(demo)), demo, 1)
    row = steps.time_steps(sample, CPU, Namespace(load=0.2, window=0.3))
    assert row.pop("steps") == 60 and count == 6 + 40 + 60 + 1
    assert row == pytest.approx(dict(ms=5, p10=5, p90=5))


# ---- profiles ----


@pytest.mark.gpu
def test_profiles_on_a_gpu(log):
    """A captured step shows its kernels, as an eager one does."""
    flags = "--model", "DiT-Demo/2", "--precision", "fp32", "fp16", "--only", "fp32", "graph"
    record, _ = log("ladder", *FEW, *flags, "--profile")
    for row in record["profiles"]:
        functions = row["functions"]
        assert not any(function["name"].startswith(("aten::", "cuda")) for function in functions)
        assert max(function["calls"] for function in functions) >= 6  # one of each block
        assert row["kinds"]["GEMM"]["ms"] > 0 and row["kinds"]["attention"]["ms"] > 0


@pytest.mark.gpu
def test_an_older_gpu(log):
    """Times and pictures of a process that sees an A100."""
    flags = "--model", "DiT-Demo/2", "--seen-as", "8.0", "--only", "graph", "--gate", 1
    record, _ = log("ladder", *FEW, *flags)
    assert record["gpu"].endswith("as 8.0") and record["rungs"][0]["judged"]["close"]


# ---- ranks ----


def test_few_pictures_on_many_ranks(tmp_path):
    output = tmp_path / "out" / "x.json"
    flags = *DEMO, 2, "--load", 0, "--window", 0.01, "--output", output
    run_ranks(2, "layouts", *flags, script="bench/measure.py")
    record = json.loads(output.read_text())
    plans = record["plans"]
    assert {(row["size"], row["tier"]) for row in plans} == {(128, "fp32")}
    one, *shared = [row for row in plans if row["labels"] == 1]
    assert (one["plan"], one["gpus"], one["speedup"]) == ("one GPU", 1, 1)
    assert {row["plan"] for row in shared} == {"rows=2", "tokens=2"}  # no layout of four ranks
    assert all(row["gpus"] == 2 and row["speedup"] == one["ms"] / row["ms"] for row in shared)
    assert {row["plan"] for row in plans if row["labels"] == 2} == {"one GPU", "pictures", "rows=2"}
    assert (record["kind"], record["gpus"], record["shape"]["width"]) == ("parallel", 2, 216)
    assert record["link"]["gb_s"] > 0 and record["link"]["us"] > 0
    assert [(row["labels"], row["tier"]) for row in record["tensor"]] == [(1, "fp32"), (2, "fp32")]
    assert all(row["ms"] > 0 for row in record["tensor"]) and record["topology"] is None
    assert record["command"].startswith("torchrun --nproc_per_node=2 bench/measure.py layouts ")


# ---- traces ----


def test_a_trace_by_hand(tmp_path):
    """An operator's time is without that of the operators that it calls, in its own thread; a GPU's
    work counts instead where there is some.
    """

    def event(cat, name, start, duration, tid=1):
        return dict(ph="X", cat=cat, name=name, ts=1e3 * start, dur=1e3 * duration, tid=tid)

    operators = [
        event("cpu_op", "aten::linear", 0, 9),
        event("cpu_op", "aten::addmm", 1, 6),
        event("cpu_op", "aten::copy_", 2, 1.5),
        event("cpu_op", "aten::gelu", 3, 3, tid=2),
        event("cpu_op", "aten::softmax", 9, 1),
    ]
    path = tmp_path / "x.gz"

    def read(events):
        with gzip.open(path, "wt") as file:
            json.dump(dict(traceEvents=[*events, dict(ph="M", name="process_name")]), file)
        return traces.read(path)

    found = {event.name: (event.kind, event.ms) for event in read(operators).work}
    assert found == {
        "aten::linear": ("element-wise", 3),
        "aten::addmm": ("GEMM", 4.5),
        "aten::copy_": ("element-wise", 1.5),
        "aten::gelu": ("element-wise", 3),
        "aten::softmax": ("attention", 1),
    }
    trace = read([*operators, event("kernel", "gemm", 4, 6), event("cuda_runtime", "x", 0, 1)])
    assert [event.name for event in trace.work] == ["gemm"] and trace.host[0].ms == 1
    assert traces.summary(trace)["kinds"] == {"GEMM": dict(ms=2, calls=1 / 3)}
