"""The profile: what torch.profiler's events are read as, and that the tables agree with the run."""

import gzip
import json
import sys

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from bench import profile_step
from models import DiT_models

STEP = profile_step.STEP


def on_host(name, start, length, id=0):
    return FunctionEvent(id, name, 1, start, start + length, use_device="cuda", stack=[])


def on_gpu(name, start, length, id=0, note=False):
    times = dict(start_us=start, end_us=start + length, stack=[])
    return FunctionEvent(id, name, 7, **times, use_device="cuda", device_type=DeviceType.CUDA, is_user_annotation=note)


def analyse(events, steps):
    events = EventList(events, use_device="cuda")
    events._build_tree()
    return profile_step.analyse(events, steps)


# Two steps of 1000 us on a GPU, and the profiler's own wait after the last. In each step a GEMM and an attention kernel
# overlap on two streams, an upload makes the host wait, and the end is idle.
EVENTS = [
    one
    for base in (0, 1000)
    for one in (
        on_host(STEP, base, 1000),
        on_host("aten::to", base + 10, 400),
        on_host("aten::copy_", base + 20, 380),
        on_host("cudaMemcpyAsync", base + 30, 5),
        on_host("cudaStreamSynchronize", base + 40, 350),
        on_host("aten::addmm", base + 500, 20),
        on_host("cudaLaunchKernel", base + 505, 5),
        on_gpu("nvjet_sm90_hsh_128x128_bias", base + 100, 300),
        on_gpu("cudnn_generated_fort_native_sdpa_sm90_flash", base + 300, 200),
        on_gpu("_norm_modulate", base + 500, 100),
        on_gpu("Memcpy HtoD (Pageable -> Device)", base + 600, 2),
        on_gpu(STEP, base, 1000, note=True),
    )
] + [on_host("cudaDeviceSynchronize", 2010, 80)]


def test_events_of_a_gpu():
    found = analyse(EVENTS, 2)
    assert found["kinds"] == {
        "GEMM": pytest.approx(0.3),
        "idle": pytest.approx(0.249),  # between the steps, not before the first kernel
        "attention": pytest.approx(0.2),
        "norm/elementwise": pytest.approx(0.1),
        "copies": pytest.approx(0.002),
    }
    assert found["window_ms"] == pytest.approx(0.751) and found["launches_per_step"] == 4
    assert found["host_copies_ms"] == pytest.approx(0.002)
    [wait] = found[
        "waits"
    ]  # a copy is queued in 5 us; the wait after it is the queue's, and the last is the profiler's
    where = "aten::to → aten::copy_ → cudaStreamSynchronize"
    assert wait == dict(where=where, per_step=1, ms_per_step=pytest.approx(0.35))
    own = {row["name"]: (row["calls"], pytest.approx(row["total_ms"])) for row in found["host"]}
    assert own["cudaStreamSynchronize"] == (2, 0.7) and own["aten::copy_"] == (2, 0.05)
    assert not {STEP, "cudaDeviceSynchronize"} & set(own)
    first = dict(name="nvjet_sm90_hsh_128x128_bias", calls=2, total_ms=0.6, average_ms=0.3)
    assert found["kernels"][0] == pytest.approx(first)


def test_a_copy_that_blocks_is_a_wait():
    """An asynchronous copy from pageable memory returns when the queue before it is done."""
    blocked = [on_host(STEP, 0, 1000), on_host("aten::item", 10, 600), on_host("cudaMemcpyAsync", 20, 500)]
    [wait] = analyse([*blocked, on_gpu("gemm", 0, 500)], 1)["waits"]
    assert wait["where"] == "aten::item → cudaMemcpyAsync" and wait["ms_per_step"] == 0.5


@pytest.mark.parametrize(
    "copy, waits", [("Memcpy DtoD (Device -> Device)", 0), ("Memcpy DtoH (Device -> Pageable)", 1)]
)
def test_a_copy_within_the_device_is_no_wait(copy, waits):
    """It is queued like a kernel, also where the host takes long to do it."""
    host = [on_host(STEP, 0, 1000), on_host("aten::copy_", 10, 90), on_host("cudaMemcpyAsync", 20, 70, id=7)]
    assert len(analyse([*host, on_gpu(copy, 200, 2, id=7)], 1)["waits"]) == waits


@pytest.mark.parametrize(
    "kernel,kind",
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>", "norm/elementwise"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>", "copies"),
        ("Memset (Device)", "copies"),
        ("attention", "attention"),
        ("fmha_cutlassF_f32_aligned_64x128_rf_sm80(PyTorchMemEffAttention)", "attention"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "GEMM"),
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("void vectorized_layer_norm_kernel<float, float>", "norm/elementwise"),
    ],
)
def test_kinds(kernel, kind):
    assert profile_step.kind_of(kernel) == kind


def test_on_a_cpu(tmp_path, monkeypatch, capsys):
    """A whole run in this process; the trace is one that viewers open, and the figures stand for the same steps."""

    def profile(*args):
        flags = ["--device", "cpu", "--load", 0, "--window", 0.1, "--pictures", 1, *args]
        monkeypatch.setattr(sys, "argv", ["profile_step.py", *map(str, flags)])
        profile_step.main()

    profile("--steps", 2, "--output", tmp_path / "a.json", "--tensorboard", tmp_path / "board")
    text = capsys.readouterr().out
    assert "no GPU here" in text and "GEMM" in text and "VAE" in text and "aten::addmm" in text
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["gpu"] is None and record["tier"] == "fp32" and record["batch_rows"] == 2 and record["commit"]
    assert record["kind"] == "profile" and record["model"] == "DiT-Demo/2" and record["weights"] == "dit.safetensors"
    assert record["torch"] == torch.__version__
    assert sum(row["ms"] for row in record["kinds"].values()) == pytest.approx(record["window_ms"], rel=0.05)
    assert (
        record["kinds"]["GEMM"]["tflops"] > 0 and 0 < record["floor_ms"] < 2 * record["timed"]["ms"]
    )  # on a loaded machine either may be slow
    with gzip.open(tmp_path / "a.trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = [one["name"] for one in events]
    assert names.count("aten::scaled_dot_product_attention") == 2 * 6  # two steps of six blocks
    assert any("Input Dims" in str(one.get("args")) for one in events)
    assert len(list((tmp_path / "board").glob("*.pt.trace.json.gz"))) == 1

    # Upstream's loop moves its tables at every step.
    profile("--steps", 1, "--output", tmp_path / "b.json", "--baseline")
    assert "upstream's arithmetic" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        profile("--steps", 500)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and "--steps 500: no viewer opens such a trace; use" in error


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            ["--model", "DiT-S/8", "--device", "cpu", "--image-size", "144"],
            "--image-size 144: must be a multiple of 64",
        ),
        (["--load", "nan"], "--load: nan: must be seconds"),
        (["--output", "x.txt"], "--output x.txt: must end in .json"),
        (
            ["--baseline", "--precision", "fp16", "--device", "cpu"],
            "--precision fp16: upstream samples in fp32 or tf32",
        ),
    ],
)
def test_refused_before_anything_is_measured(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        profile_step.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and words in error


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, monkeypatch, capsys):
    """A captured step shows its kernels and no wait; upstream's loop waits for each of its copies."""
    records = {}
    for name, *flags in (["fast"], ["upstream", "--baseline"]):
        monkeypatch.setattr(
            sys,
            "argv",
            [
                "profile_step.py",
                "--model",
                "DiT-Demo/2",
                "--load",
                "0",
                "--output",
                str(tmp_path / f"{name}.json"),
                *flags,
            ],
        )
        profile_step.main()
        records[name] = json.loads((tmp_path / f"{name}.json").read_text())
        assert all(records[name]["kinds"][kind]["ms"] > 0 for kind in ("GEMM", "attention", "norm/elementwise"))
        assert records[name]["decoding_ms"] > 0
    assert not records["fast"]["waits"] and "never waits" in capsys.readouterr().out
    waits = records["upstream"]["waits"]
    assert 10 <= sum(wait["per_step"] for wait in waits) <= 12 and "aten::copy_" in waits[0]["where"]
    assert records["upstream"]["timed"]["ms"] > records["fast"]["timed"]["ms"]


def test_upstreams_traffic_changes_no_number():
    """The baseline's loop gives the very pictures of p_sample_loop, and copies what upstream copies: 8 tables, the
    map, timesteps, frequencies."""
    from diffusion import create_diffusion

    model = DiT_models["DiT-S/8"](input_size=16, num_classes=4).eval()
    for value in model.parameters():
        torch.nn.init.normal_(value, std=0.05, generator=torch.Generator().manual_seed(value.numel()))
    ours, theirs = create_diffusion("3"), create_diffusion("3")
    theirs.__class__ = profile_step.UploadingDiffusion
    z, labels = torch.randn(2, 4, 16, 16), torch.tensor([1, 3])
    torch.manual_seed(0)
    y = torch.tensor([1, 3, 4, 4])
    want = ours.p_sample_loop(
        model.forward_with_cfg,
        (4, 4, 16, 16),
        torch.cat([z, z]),
        clip_denoised=False,
        model_kwargs=dict(y=y, cfg_scale=4.0),
    )
    torch.manual_seed(0)
    looked_up = []
    monkey = profile_step.UploadingDiffusion._at
    try:
        profile_step.UploadingDiffusion._at = lambda self, name, t, x: (
            looked_up.append(name) or monkey(self, name, t, x)
        )
        got = profile_step.upstream_loop(model, theirs, z, labels, 4.0, 4, on_step=lambda *_: None)
    finally:
        profile_step.UploadingDiffusion._at = monkey
    assert torch.equal(got, want) and len(looked_up) == 3 * 8
