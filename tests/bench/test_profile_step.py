"""The profile: times by kind from torch.profiler's events, and whole runs."""

import gzip
import json

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from bench import profile_step


def on_host(name, start, length):
    return FunctionEvent(0, name, 1, start, start + length, use_device="cuda", stack=[])


def on_gpu(name, start, length, note=False):
    times = dict(start_us=start, end_us=start + length, stack=[])
    return FunctionEvent(
        0, name, 7, **times, use_device="cuda", device_type=DeviceType.CUDA, is_user_annotation=note
    )


def analyse(events, steps):
    events = EventList(events, use_device="cuda")
    events._build_tree()
    return profile_step.analyse(events, steps)


# Two steps of 1000 us on a GPU, and the profiler's own wait after the last. In each step
# a GEMM and an attention kernel overlap on two streams, and the end is idle. Kernels of torch,
# cuBLAS, cuDNN and ours.
KERNELS = (
    (
        "nvjet_sm90_hsh_128x128_bias",
        "cudnn_generated_fort_native_sdpa_sm90_flash",
        "_norm_modulate",
        "Memcpy HtoD",
    ),
    (
        "void cublasLt::splitKreduce_kernel<32, 16>",
        "fmha_cutlassF_f32_aligned_64x128_rf_sm80(PyTorchMemEffAttention)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>",
    ),
)
EVENTS = [
    one
    for base, (gemm, attention, norm, copy) in zip((0, 1000), KERNELS)
    for one in (
        on_host("ProfilerStep*", base, 1000),
        on_host("aten::copy_", base + 20, 380),
        on_host("cudaMemcpyAsync", base + 30, 5),
        on_host("cudaStreamSynchronize", base + 40, 350),
        on_host("cudaLaunchKernel", base + 505, 5),
        on_gpu(gemm, base + 100, 300),
        on_gpu(attention, base + 300, 200),
        on_gpu(norm, base + 500, 100),
        on_gpu(copy, base + 600, 2),
        on_gpu("ProfilerStep*", base, 1000, note=True),
    )
] + [on_host("cudaDeviceSynchronize", 2010, 80)]


def test_events_of_a_gpu():
    found = analyse(EVENTS, 2)
    assert {kind: row["ms"] for kind, row in found["kinds"].items()} == {
        "GEMM": pytest.approx(0.3),
        "idle": pytest.approx(0.249),  # between the steps, not before the first kernel
        "attention": pytest.approx(0.2),
        "norm/elementwise": pytest.approx(0.1),
        "copies": pytest.approx(0.002),
    }
    assert found["window_ms"] == pytest.approx(0.751) and found["launches_per_step"] == 4
    assert found["kinds"]["GEMM"]["share"] == pytest.approx(0.3 / 0.751)


FEW = "--load", 0, "--window", 0.1, "--pictures", 1


def test_on_a_cpu(tmp_path, log):
    record, printed = log("profile_step", *FEW, "--device", "cpu", "--steps", 2)
    assert "aten::addmm" in printed
    assert (
        record["gpu"] is None
        and record["tier"] == "fp32"
        and record["batch_rows"] == 2
        and record["commit"]
    )
    assert (
        record["kind"] == "profile"
        and record["model"] == "DiT-Demo/2"
        and record["weights"] == "dit.safetensors"
    )
    assert (
        record["window_ms"] > 0
        and record["floor_ms"] > 0
        and not record["baseline"]
        and "kinds" not in record
    )
    # Two rows of 64 tokens through six blocks of 216: GEMMs 12·D², attention 2·T·D a
    # token, 2 a multiply-add.
    gemms = 2 * 2 * 64 * 6 * 12 * 216**2
    attention = 2 * 2 * 64 * 6 * 2 * 64 * 216
    assert (
        record["flops"]["attention"] == attention and gemms < record["flops"]["GEMM"] < 1.05 * gemms
    )
    with gzip.open(tmp_path / "log.trace.json.gz") as file:
        names = [one["name"] for one in json.load(file)["traceEvents"]]
    assert names.count("aten::scaled_dot_product_attention") == 2 * 6  # two steps of six blocks


@pytest.mark.gpu
def test_on_a_gpu(log):
    """A captured step shows its kernels."""
    records = {}
    for name, *flags in (["fast"], ["upstream", "--baseline"]):
        records[name], _ = log("profile_step", *FEW, "--model", "DiT-Demo/2", *flags)
        assert all(
            records[name]["kinds"][kind]["ms"] > 0
            for kind in ("GEMM", "attention", "norm/elementwise")
        )
        assert 0 < records[name]["kinds"]["GEMM"]["of_ceiling"] < 1.5
    assert (
        records["upstream"]["baseline"]
        and records["upstream"]["timed"]["ms"] > records["fast"]["timed"]["ms"]
    )
