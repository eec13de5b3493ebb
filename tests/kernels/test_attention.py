"""Attention's backends against float64, from the packed projection, over shapes, dtypes
and unusual inputs; the machine code of our kernel.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from kernel_testing import draw, error, formula, needs_hopper
from torch._subclasses.fake_tensor import FakeTensorMode

from accel.kernels.attention import attention, attention_to, hopper

CPU_BACKENDS = ("auto", "flash", "torch")
# (N, T, heads, head dim): tails of every size, one token, one head, a head dim that is no
# multiple of 8.
SHAPES = (
    (2, 64, 3, 72),
    (1, 1, 1, 72),
    (3, 17, 2, 72),
    (2, 130, 2, 72),
    (2, 33, 2, 64),
    (1, 50, 3, 36),
)
TOLERANCES = ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 8e-3))
CONFIGS = (hopper.LONG, hopper.SHORT, hopper.SINGLE)


def packed(n, tokens, heads, dim, dtype, device="cpu", seed=0):
    return draw(n, tokens, 3 * heads * dim, seed=seed).to(dtype).to(device)


def cross(n, queries, keys, heads, dim, dtype, device="cpu"):
    """Return packed projections of `queries` tokens, keys and values of others, and their
    attention in float64.
    """
    qkv = packed(n, queries, heads, dim, dtype, device)
    kv = packed(n, keys, heads, dim, dtype, device, seed=1)[..., heads * dim :].contiguous()
    return qkv, kv, formula(qkv, heads, kv)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_backends_on_the_cpu(backend, shape):
    for dtype, tolerance in TOLERANCES:
        qkv = packed(*shape, dtype)
        got = attention(qkv, shape[2], backend)
        assert (
            got.dtype == dtype
            and got.shape == (*shape[:2], shape[2] * shape[3])
            and got.is_contiguous()
        )
        assert error(got, formula(qkv, shape[2])) <= tolerance


def check(n, tokens, heads, device, dtype, run):
    """Check typical, sharp and flat weights; repeated runs give the same bits."""
    tolerance = 4e-4 if dtype == torch.float16 else 3e-3
    for sharpness in (1, 30, 0):
        qkv = packed(n, tokens, heads, 72, dtype, device, tokens)
        qkv[..., : 2 * heads * 72] *= sharpness
        got = run(qkv, heads)
        bound = tolerance * (2 if sharpness == 30 else 1)
        assert (
            got.is_contiguous()
            and got.isfinite().all()
            and error(got, formula(qkv, heads)) <= bound
        )
        assert torch.equal(got, run(qkv, heads))


@pytest.mark.parametrize("queries, keys", ((5, 17), (17, 5), (64, 128)))
def test_other_keys_and_values(queries, keys):
    for dtype, tolerance in TOLERANCES:
        qkv, kv, want = cross(2, queries, keys, 3, 72, dtype)
        for backend in CPU_BACKENDS:
            assert error(attention_to(qkv, kv, 3, backend), want) <= tolerance


@pytest.mark.parametrize("dim", (64, 36))
@pytest.mark.parametrize("backend", ("cudnn", "flash", "efficient"))
def test_torch_declares_the_kernels_as_they_are_called(backend, dim):
    """Private operators may change in another version of torch."""
    with FakeTensorMode():
        qkv = torch.empty(2, 16, 3 * 4 * dim, dtype=torch.float16, device="cuda")
        kv = torch.empty(2, 24, 2 * 4 * dim, dtype=torch.float16, device="cuda")
        for given in (None, kv):
            out = attention_to(qkv, given, 4, backend)
            assert (out.shape, out.dtype) == ((2, 16, 4 * dim), torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", (64, 72, 24))
def test_float32_without_tensor_cores(dim):
    """Tails of queries and keys, sharp weights; the same bits every time."""
    for n, queries, keys, heads in ((1, 1, 1, 1), (2, 130, 65, 3), (3, 1000, 1024, 2)):
        for sharpness in (1, 30):
            qkv = packed(n, queries, heads, dim, torch.float32, "cuda")
            qkv[..., : heads * dim] *= sharpness
            kv = packed(n, keys, heads, dim, torch.float32, "cuda", 1)[..., heads * dim :]
            for given in (None, kv.contiguous()):
                got = attention_to(qkv, given, heads, "simt")
                want = formula(qkv, heads, given)
                own = error(formula(qkv, heads, given, torch.float32), want)
                assert error(got, want) <= 3 * max(own, 2e-7)
                assert torch.equal(got, attention_to(qkv, given, heads, "simt"))


@pytest.mark.gpu
@pytest.mark.parametrize("queries, keys", ((5, 17), (512, 1024), (256, 4096), (300, 77)))
def test_other_keys_and_values_on_a_gpu(queries, keys):
    capability = torch.cuda.get_device_capability()
    ours = ("hopper",) if capability[0] == 9 else ()
    backends = ("torch", "efficient") + ("flash", "cudnn") * (capability >= (8, 0)) + ours
    qkv, kv, want = cross(2, queries, keys, 16, 72, torch.float16, "cuda")
    for backend in backends:
        assert error(attention_to(qkv, kv, 16, backend), want) <= 1e-3, backend


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_our_kernel(config, dtype):
    """Tails of queries and keys, more work than a GPU runs at once."""
    needs_hopper()
    shapes = (
        (1, 1, 1),
        (1, 64, 1),
        (3, 17, 2),
        (2, 130, 2),
        (2, 191, 5),
        (2, 256, 16),
        (1, 1000, 5),
        (4, 1024, 16),
    )
    for shape in (*shapes, (1, 4096, 3)):
        check(*shape, "cuda", dtype, lambda qkv, heads: hopper.attention(qkv, None, heads, config))


@pytest.mark.gpu
def test_our_kernel_is_as_accurate_as_flash():
    needs_hopper()
    qkv = packed(2, 1024, 16, 72, torch.float16, "cuda")
    want = formula(qkv, 16)
    assert error(attention(qkv, 16), want) <= 1.05 * error(attention(qkv, 16, "flash"), want)


@pytest.mark.gpu
def test_threads_leave_other_kernels_on():
    """Networks warm up in threads; this must not disable kernels of torch for other code."""
    capability = torch.cuda.get_device_capability()
    backends = ("efficient",) + ("flash", "cudnn") * (capability >= (8, 0))

    def attend(index):
        qkv = packed(1, 64, 2, 64, torch.float16, "cuda", seed=index)
        got = attention(qkv, 2, backends[index % len(backends)])
        assert error(got, formula(qkv, 2)) <= 4e-4

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(attend, range(200)))
    q = draw(1, 2, 64, 72, device="cuda")
    out = F.scaled_dot_product_attention(q, q, q)  # float32, which cuDNN and flash refuse
    assert error(out, (q.double() @ q.double().mT / 72**0.5).softmax(-1) @ q.double()) <= 1e-5
