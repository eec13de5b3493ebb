"""Attention's routes against float64, from the packed projection, over shapes, dtypes and unusual inputs; our kernel's machine code."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from accel.kernels import attention as module
from accel.kernels.attention import ROUTES, attention, attention_lse, attention_to, hopper

CPU_ROUTES = ("auto", "math", "flash")
# (N, T, heads, head dim): tails of every size, one token, one head, a head dim that is no multiple of 8.
SHAPES = ((2, 64, 3, 72), (1, 1, 1, 72), (3, 17, 2, 72), (2, 130, 2, 72), (2, 33, 2, 64), (1, 50, 3, 36))


def packed(n, tokens, heads, dim, dtype, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, tokens, 3 * heads * dim, generator=generator).to(dtype).to(device)


def reference(qkv, heads):
    """The formula written out, one head at a time, in float64."""
    n, tokens, width = qkv.shape
    dim = width // (3 * heads)
    out = torch.empty(n, tokens, heads * dim, dtype=torch.float64, device=qkv.device)
    for head in range(heads):
        q, k, v = (qkv[..., (part * heads + head) * dim :][..., :dim].double() for part in range(3))
        scores = q @ k.mT / dim**0.5
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        out[..., head * dim : (head + 1) * dim] = weights @ v / weights.sum(-1, keepdim=True)
    return out


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("route", CPU_ROUTES)
@pytest.mark.parametrize("shape", SHAPES)
def test_routes_on_the_cpu(route, shape):
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)):
        qkv = packed(*shape, dtype)
        got = attention(qkv, shape[2], route)
        assert got.dtype == dtype and got.shape == (*shape[:2], shape[2] * shape[3]) and got.is_contiguous()
        assert error(got, reference(qkv, shape[2])) <= tolerance


def cross(n, queries, keys, heads, dim, dtype, device="cpu"):
    """Packed projections of `queries` tokens, and of keys and values of others; attention and log-sum-exp in float64."""
    qkv, kv = (
        packed(n, queries, heads, dim, dtype, device),
        packed(n, keys, heads, dim, dtype, device, seed=1)[..., heads * dim :].contiguous(),
    )
    q = qkv[..., : heads * dim].double().unflatten(-1, (heads, dim))
    k, v = kv.double().unflatten(-1, (2, heads, dim)).unbind(2)
    scores = torch.einsum("nqhd,nkhd->nhqk", q, k) / dim**0.5
    return qkv, kv, torch.einsum("nhqk,nkhd->nqhd", scores.softmax(-1), v).flatten(2), scores.logsumexp(-1)


@pytest.mark.parametrize("queries, keys", ((5, 17), (17, 5), (64, 128)))
def test_other_keys_and_values(queries, keys):
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)):
        qkv, kv, want, want_lse = cross(2, queries, keys, 3, 72, dtype)
        for route in CPU_ROUTES:
            assert error(attention_to(qkv, kv, 3, route), want) <= tolerance
        for route in ("auto", "flash"):
            out, lse = attention_lse(qkv, kv, 3, route)
            assert error(out, want) <= tolerance and error(lse, want_lse) <= max(
                tolerance, 1e-6 if dtype == torch.bfloat16 else 0
            )
    with pytest.raises(ValueError, match="gives no log-sum-exp"):
        attention_lse(qkv, kv, 3, "math")


@pytest.mark.gpu
@pytest.mark.parametrize("queries, keys", ((5, 17), (512, 1024), (256, 4096), (300, 77)))
def test_other_keys_and_values_on_a_gpu(queries, keys):
    hopper_too = ("hopper",) if torch.cuda.get_device_capability() == (9, 0) else ()
    for route in (
        "efficient",
        *(("flash", "cudnn") if torch.cuda.get_device_capability() >= (8, 0) else ()),
        *hopper_too,
    ):
        qkv, kv, want, want_lse = cross(2, queries, keys, 16, 72, torch.float16, "cuda")
        out, lse = attention_lse(qkv, kv, 16, route)
        assert (
            error(out, want) <= 1e-3
            and error(attention_to(qkv, kv, 16, route), want) <= 1e-3
            and error(lse, want_lse) <= 1e-3
        ), route


@pytest.mark.parametrize("route", CPU_ROUTES)
def test_gradient(route):
    qkv = packed(2, 10, 2, 72, torch.float64).requires_grad_()
    weight = torch.randn(2, 10, 144, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (got,) = torch.autograd.grad((attention(qkv, 2, route) * weight).sum(), qkv)
    (want,) = torch.autograd.grad((reference(qkv, 2) * weight).sum(), qkv)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scale", (1e2, 0.0))
def test_large_and_equal_logits(scale):
    """At 1e2 logits reach 1e4 and softmax is a maximum; at 0 the values' mean."""
    qkv = packed(1, 40, 2, 72, torch.float32)
    qkv[..., :288] *= scale
    for route in CPU_ROUTES:
        assert error(attention(qkv, 2, route), reference(qkv, 2)) < (1e-3 if scale else 1e-6)


def test_refusals():
    """One line, with the remedy, and nothing runs instead."""
    qkv = packed(1, 4, 1, 72, torch.float16)
    for route in set(ROUTES) - set(CPU_ROUTES):
        with pytest.raises(ValueError, match="take 'auto'") as refused:
            attention(qkv, 1, route)
        assert "\n" not in str(refused.value) and route in str(refused.value)
    with pytest.raises(ValueError, match="one of auto, math"):
        attention(qkv, 1, "nonsense")


@pytest.mark.parametrize(
    "capability, dtype, expected",
    (
        ((7, 0), torch.float16, "efficient"),
        ((7, 0), torch.float32, "efficient"),
        ((7, 5), torch.float16, "efficient"),
        ((8, 0), torch.float16, "flash"),
        ((8, 0), torch.bfloat16, "flash"),
        ((8, 0), torch.float32, "efficient"),
        ((9, 0), torch.float16, "hopper"),
        ((9, 0), torch.bfloat16, "hopper"),
        ((10, 0), torch.float16, "flash"),
        ((9, 0), torch.float32, "efficient"),
        ((9, 0), torch.float64, "default"),
    ),
)
def test_auto_by_capability(capability, dtype, expected, monkeypatch):
    """The choice is a table of the GPU's capability: asked without the GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert module.choose.__wrapped__(torch.device("cuda"), dtype, 72) == expected
    if expected == "hopper":  # which has neither a gradient nor another head dim
        assert module.choose.__wrapped__(torch.device("cuda"), dtype, 72, True) == "cudnn"
        assert module.choose.__wrapped__(torch.device("cuda"), dtype, 64) == "cudnn"


def test_auto_leaves_the_cpu_to_torch():
    assert module.choose(torch.device("cpu"), torch.float32, 72) == "default"


@pytest.mark.parametrize("route", ("flash", "cudnn", "hopper"))
def test_a_v100_is_refused_what_it_has_not(route, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    with pytest.raises(ValueError, match=route):
        module.refuse.__wrapped__(route, torch.device("cuda"), torch.float16, 72)
    with pytest.raises(ValueError, match="bfloat16"):
        module.refuse.__wrapped__("efficient", torch.device("cuda"), torch.bfloat16, 72)


#################################################################################
#                      Our kernel, compiled without a GPU                       #
#################################################################################


@pytest.mark.parametrize("config", (hopper.LONG, hopper.SHORT, hopper.SINGLE))
def test_machine_code(config, tmp_path):
    """Products of exactly 72 columns, no register spilled in the loop over the keys, and shared memory that a multiprocessor has."""
    for dtype in (torch.float16, torch.bfloat16):
        (tmp_path / "cubin").write_bytes(hopper.compile_cubin(config, dtype))
        assembly = disassemble(tmp_path / "cubin")
        products = re.findall(r"HGMMA\.(64x\d+x16)\.F32(\.BF16)?", assembly)
        assert {shape for shape, _ in products} == {f"64x{config.keys}x16", "64x72x16"}
        assert all(bool(bf16) == (dtype == torch.bfloat16) for _, bf16 in products)
        assert "UTMALDG.4D" in assembly and "USETMAXREG" in assembly
        loop_begins = [match.start() for match in re.finditer(rf"HGMMA\.64x{config.keys}x16", assembly)][
            5
        ]  # five belong to the first tile
        loop = assembly[loop_begins : assembly.rindex("HGMMA.64x72x16")]
        assert loop.count("MUFU.EX2") >= config.keys // 2 and loop.count("STL") + loop.count("LDL") <= 8
    assert config.blocks * (config.shared_bytes + 1024) <= 228 * 1024
    computing, copying = hopper.hopper.registers(config.warpgroups, blocks=config.blocks).values()
    assert config.blocks * 128 * (config.warpgroups * computing + copying) <= 65536


def disassemble(file):
    tool = shutil.which("cuobjdump")
    if tool is None:
        triton = pytest.importorskip("triton", reason="needs cuobjdump, which CUDA's toolkit and Triton bring")
        tool = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    return subprocess.run([tool, "-sass", str(file)], capture_output=True, text=True, check=True).stdout


#################################################################################
#                                     GPU                                       #
#################################################################################


GPU_ROUTES = ("math", "efficient", "flash", "cudnn")


@pytest.mark.gpu
@pytest.mark.parametrize("route", GPU_ROUTES)
@pytest.mark.parametrize("dtype, tolerance", ((torch.float16, 1e-3), (torch.bfloat16, 8e-3)))
def test_routes_on_a_gpu(route, dtype, tolerance):
    for shape in ((2, 64, 3, 72), (3, 17, 2, 72), (2, 130, 2, 72), (2, 256, 16, 72)):
        qkv = packed(*shape, dtype, "cuda")
        got = attention(qkv, shape[2], route)
        assert got.is_contiguous() and error(got, reference(qkv, shape[2])) <= tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("route", ("efficient", "flash", "cudnn", "hopper"))
def test_nothing_is_copied(route):
    if route == "hopper":
        needs_hopper()
    qkv = packed(2, 256, 16, 72, torch.float16, "cuda")
    with torch.inference_mode():
        attention(qkv, 16, route)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            attention(qkv, 16, route)
            torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if not event.key.startswith("cuda")]
    assert kernels and not any(
        word in kernel.lower() for kernel in kernels for word in ("copy", "cat", "transpose", "pad")
    ), kernels


def needs_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("our kernel needs a GPU of capability 9.0")


@pytest.mark.gpu
@pytest.mark.parametrize("config", (hopper.LONG, hopper.SHORT, hopper.SINGLE))
@pytest.mark.parametrize("dtype, tolerance", ((torch.float16, 4e-4), (torch.bfloat16, 3e-3)))
def test_our_kernel(config, dtype, tolerance):
    """Tails of queries and keys, more work than a GPU takes at once, sharp and flat weights; the log-sum-exp; the same bits every time."""
    needs_hopper()
    for n, tokens, heads in (
        (1, 1, 1),
        (1, 64, 1),
        (3, 17, 2),
        (2, 130, 2),
        (2, 191, 5),
        (2, 256, 16),
        (1, 1000, 5),
        (4, 1024, 16),
        (1, 4096, 3),
    ):
        for sharpness in (1, 30, 0):
            qkv = packed(n, tokens, heads, 72, dtype, "cuda", tokens)
            qkv[..., : 2 * heads * 72] *= sharpness
            got, lse = hopper.attention_hopper(qkv, heads, config)
            want = reference(qkv, heads)
            assert got.isfinite().all() and error(got, want) <= tolerance * (2 if sharpness == 30 else 1)
            q, k, _ = qkv.double().unflatten(-1, (3, heads, 72)).permute(2, 0, 3, 1, 4).unbind(0)  # each (N, h, T, d)
            torch.testing.assert_close(lse.double(), (q @ k.mT / 72**0.5).logsumexp(-1), rtol=2e-6, atol=2e-6)
            assert torch.equal(got, hopper.attention_hopper(qkv, heads, config)[0])


@pytest.mark.gpu
def test_our_kernel_is_as_accurate_as_flash_and_is_taken(monkeypatch):
    needs_hopper()
    qkv = packed(2, 1024, 16, 72, torch.float16, "cuda")
    want = reference(qkv, 16)
    assert error(attention(qkv, 16), want) <= 1.05 * error(attention(qkv, 16, "flash"), want)
    launched = []
    monkeypatch.setattr(hopper, "attention_hopper", lambda *arguments: launched.append(arguments) or (qkv,))
    attention(qkv, 16)
    assert len(launched) == 1
    assert attention(qkv.requires_grad_(), 16).requires_grad and len(launched) == 1


@pytest.mark.gpu
def test_our_kernel_in_a_graph():
    needs_hopper()
    qkv = packed(2, 300, 16, 72, torch.float16, "cuda")
    attention(qkv, 16, "hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(qkv, 16, "hopper")
    qkv.copy_(packed(2, 300, 16, 72, torch.float16, "cuda", seed=1))
    graph.replay()
    assert torch.equal(out, attention(qkv, 16, "hopper"))
