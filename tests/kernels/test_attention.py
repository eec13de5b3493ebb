"""Attention's routes against float64, from the packed projection, over shapes, dtypes and unusual inputs."""

import pytest
import torch

from accel.kernels import attention as module
from accel.kernels.attention import ROUTES, attention

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
        q, k, v = (qkv[..., (part * heads + head) * dim:][..., :dim].double() for part in range(3))
        scores = q @ k.mT / dim ** 0.5
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        out[..., head * dim:(head + 1) * dim] = weights @ v / weights.sum(-1, keepdim=True)
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


@pytest.mark.parametrize("capability, dtype, expected", (
    ((7, 0), torch.float16, "efficient"), ((7, 0), torch.float32, "efficient"), ((7, 5), torch.float16, "efficient"),
    ((8, 0), torch.float16, "flash"), ((8, 0), torch.bfloat16, "flash"), ((8, 0), torch.float32, "efficient"),
    ((9, 0), torch.float32, "efficient"), ((9, 0), torch.float64, "default")))
def test_auto_by_capability(capability, dtype, expected, monkeypatch):
    """The choice is a table of the GPU's capability: asked without the GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert module.choose.__wrapped__(torch.device("cuda"), dtype) == expected


def test_auto_leaves_the_cpu_to_torch():
    assert module.choose(torch.device("cpu"), torch.float32) == "default"


@pytest.mark.parametrize("route", ("flash", "cudnn"))
def test_a_v100_is_refused_what_it_has_not(route, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    with pytest.raises(ValueError, match=route):
        module.refuse.__wrapped__(route, torch.device("cuda"), torch.float16)
    with pytest.raises(ValueError, match="bfloat16"):
        module.refuse.__wrapped__("efficient", torch.device("cuda"), torch.bfloat16)


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
@pytest.mark.parametrize("route", ("efficient", "flash", "cudnn"))
def test_nothing_is_copied(route):
    """One kernel a call, and no memory beyond the result and the log-sum-exp."""
    qkv = packed(2, 256, 16, 72, torch.float16, "cuda")
    with torch.inference_mode():
        attention(qkv, 16, route)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            attention(qkv, 16, route)
            torch.cuda.synchronize()
    assert sum("copy" in event.key.lower() or "memcpy" in event.key.lower() for event in profile.key_averages()) == 0
