"""Steps: every rung of the ladder adds one thing, a profile tells kinds of work apart, ranks
share a batch. The command runs where there is no GPU.
"""

import gzip
import json
from inspect import signature

import pytest
import torch
from forks import succeeds
from jobs import run as run_ranks
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from accel.families import constructor_of
from bench import harness, steps
from bench.harness import Rival

FEW = "--load", 0, "--window", 0.1


def test_each_rung_adds_one_switch(monkeypatch):
    monkeypatch.setattr(steps.precision, "supports", lambda tier, device: True)
    rungs = [rung for rung in steps.ladder(torch.device("cuda"), ["fp16"]) if rung[1] == "fp16"]
    changes = [
        {name for name, value in after[2].items() if before[2][name] != value}
        for before, after in zip(rungs, rungs[1:])
    ]
    assert [len(change) for change in changes] == [1] * len(changes)
    parameters = signature(harness.build).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
    # the last is what users get
    assert set.union(*changes) == set(defaults) and rungs[-1][2] == defaults


def test_on_a_cpu_the_demo_is_timed(log):
    record, _ = log("steps", *FEW, "--device", "cpu", "--pictures", 1, "--gate", 1)
    [rung] = record["rungs"]
    assert (
        rung["rung"] == "fp32"
        and 0 < rung["p10"] <= rung["ms"] <= rung["p90"]
        and 0 < rung["error"] < 1e-5
    )
    assert (
        record["kind"] == "steps"
        and record["model"] == "DiT-Demo/2"
        and record["weights"] == "dit.safetensors"
    )
    assert record["batch_rows"] == 2 and record["gpu"] is None and record["profiles"] == []
    assert record["shape"]["depth"] == 6 and record["shape"]["tokens"] == 64


def test_a_judge_sees_a_worse_tier():
    """Eight pictures of two steps: fp32 equals itself, a network with other weights does not."""
    judge = steps.Judge(1, torch.device("cpu"), each=8, steps=2)
    same = judge.judge("fp32", {})
    assert (
        same["contest"] and same["strict"] and same["pictures"] == 8 and same["worst"]["mae"] == 0
    )
    cpu = torch.device("cpu")
    model = harness.random_network(constructor_of("DiT-Demo/2"), cpu, num_classes=8)
    worse = judge.judge("fp32", {}, model)
    assert not worse["contest"] and not worse["strict"] and worse["worst"]["psnr"] < 40


def test_the_eager_rival_computes_the_model():
    model = constructor_of("DiT-Demo/2")().eval()
    torch.nn.init.normal_(model.final_layer.linear.weight)
    x = torch.randn(2, 4, 16, 16, dtype=torch.float64)
    t = torch.tensor([3.0, 500.0])
    y = torch.tensor([1, 8])
    with torch.no_grad():
        want = model(x.float(), t, y)
        got = Rival("eager", model, torch.float32, torch.device("cpu")).forward(x, t, y)
    assert got.dtype == torch.float64 and got.std() > 0.1
    torch.testing.assert_close(got, want.double(), rtol=0, atol=1e-6)


# ---- profiles ----


def test_a_profile_on_a_cpu(tmp_path, log):
    flags = "--device", "cpu", "--pictures", 1, "--profile"
    record, printed = log("steps", *FEW, *flags)
    [row] = record["profiles"]
    assert row["tier"] == "fp32" and "fp32, profiled: " in printed
    functions = row["functions"]
    assert len(functions) == 10 and all(function["name"] in printed for function in functions)
    times = [function["ms"] for function in functions]
    assert times == sorted(times, reverse=True) and times[-1] > 0
    linear = next(function for function in functions if function["name"] == "aten::addmm")
    assert linear["calls"] >= 6 * 4 and linear["kind"] == "GEMM"
    assert {*row["kinds"]} == {"GEMM", "attention", "element-wise"}
    assert row["kinds"]["GEMM"]["ms"] >= linear["ms"] > row["kinds"]["attention"]["ms"] > 0
    # what the kinds take is a step's time, up to this machine's other work
    assert 0 < sum(kind["ms"] for kind in row["kinds"].values()) < 3 * record["rungs"][0]["ms"]
    assert record["ceilings"]["tflops"]["fp32"] > 0 and record["ceilings"]["gb_s"] > 0
    with gzip.open(tmp_path / row["trace"]) as file:
        names = [event["name"] for event in json.load(file)["traceEvents"]]
    assert names.count("aten::scaled_dot_product_attention") == steps.RECORDED * 6  # of six blocks


@pytest.mark.parametrize(
    "kind, names",
    [
        (
            "GEMM",
            "nvjet_sm90_hsh_192x192_64x4 sm80_xmma_gemm_f32f32 cutlass_70_tensorop_s884gemm_f16 "
            "volta_sgemm_128x64_tn split_linear_kernel aten::addmm aten::mm aten::mkldnn_convolution",
        ),
        (
            "attention",
            "fmha_cutlassF_f32_aligned_64x64_rf_sm70 pytorch_flash::flash_fwd_kernel "
            "aten::_scaled_dot_product_flash_attention_for_cpu cudnn_generated_fort_native_sdpa",
        ),
        (
            "element-wise",
            "vectorized_layer_norm_kernel Memcpy elementwise_kernel<convert> aten::gelu aten::addcmul",
        ),
    ],
)
def test_the_kind_of_work_follows_from_the_name(kind, names):
    assert {steps.kind_of(name) for name in names.split()} == {kind}


def on_host(name, start, length):
    return FunctionEvent(0, name, 1, start, start + length, use_device="cuda", stack=[])


def on_gpu(name, start, length, note=False):
    times = dict(start_us=start, end_us=start + length, stack=[])
    return FunctionEvent(
        0, name, 7, **times, use_device="cuda", device_type=DeviceType.CUDA, is_user_annotation=note
    )


def test_functions_of_a_gpu_are_its_kernels_and_copies(monkeypatch):
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
    monkeypatch.setattr(steps, "RECORDED", 2)
    assert steps.by_function(events, torch.device("cuda")) == [
        dict(name="nvjet_sm90_hsh", kind="GEMM", ms=pytest.approx(0.3), calls=1),
        dict(name="attention", kind="attention", ms=pytest.approx(0.2), calls=2),
        dict(name="Memcpy HtoD", kind="element-wise", ms=pytest.approx(0.002), calls=1),
    ]


@pytest.mark.gpu
def test_profiles_on_a_gpu(log):
    """A captured step shows its kernels, as an eager one does."""
    flags = "--model", "DiT-Demo/2", "--precision", "fp32", "fp16", "--only", "fp32", "graph"
    record, _ = log("steps", *FEW, *flags, "--profile")
    for row in record["profiles"]:
        functions = row["functions"]
        assert not any(function["name"].startswith(("aten::", "cuda")) for function in functions)
        assert max(function["calls"] for function in functions) >= 6  # one of each block
        assert row["kinds"]["GEMM"]["ms"] > 0 and row["kinds"]["attention"]["ms"] > 0


# ---- ranks ----


def test_few_pictures_on_many_ranks(tmp_path):
    """Error of each layout against one rank; what the device implies is the demo in fp32."""
    output = tmp_path / "out" / "x.json"
    flags = "--pictures", 1, 2, "--load", 0, "--window", 0.01, "--output", output
    text = run_ranks(2, "--device", "cpu", *flags, script="bench/steps.py")
    assert text.count("say nothing about a GPU's") == 1
    record = json.loads(output.read_text())
    plans = record["plans"]
    assert {(row["size"], row["tier"]) for row in plans} == {(128, "fp32")}
    one, *shared = [row for row in plans if row["labels"] == 1]
    assert (one["plan"], one["gpus"], one["speedup"]) == ("one GPU", 1, 1)
    assert {row["plan"] for row in shared} == {"rows=2", "tokens=2"}  # no layout of four ranks
    assert all(row["gpus"] == 2 and row["speedup"] == one["ms"] / row["ms"] for row in shared)
    assert all(row["error"] < 1e-5 for row in shared)
    assert {row["plan"] for row in plans if row["labels"] == 2} == {"one GPU", "pictures", "rows=2"}
    assert record["kind"] == "parallel" and record["gpu"] is None and record["gpus"] == 2
    assert record["link"]["gb_s"] > 0 and record["link"]["us"] > 0
    assert record["shape"]["width"] == 216 and record["weights"] == "dit.safetensors"
    assert record["command"].startswith("torchrun --nproc_per_node=2 ")


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["DiT-Demo/2", "Large-DiT-Demo/2"])
def test_rivals_on_a_gpu(model, log):
    flags = "--model", model, "--only", "exact", "CUDA graph", "--vs", "eager", "compile"
    rungs = {rung["rung"]: rung for rung in log("steps", *FEW, *flags)[0]["rungs"]}
    assert [*rungs] == [
        "exact",
        "fp16 + CUDA graph",
        "fp16 + eager",
        "fp16 + torch.compile default",
    ]
    assert all(rung["ms"] > 0 and rung["error"] < 1e-2 for rung in rungs.values())
    assert rungs["exact"]["error"] < 1e-5


@pytest.mark.gpu
def test_an_older_gpu(run, tmp_path):
    """Times and pictures of a process that sees an A100."""
    few = "--model", "DiT-Demo/2", "--seen-as", "8.0", "--load", 0, "--window", 0.2
    succeeds(
        run(
            "bench/steps.py",
            *few,
            "--only",
            "CUDA graph",
            "--gate",
            1,
            "--output",
            tmp_path / "out.json",
        )
    )
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["gpu"].endswith("as 8.0") and record["rungs"][0]["judged"]["contest"]
