"""Split attention against float64: the reference, Triton's kernel through its interpreter
on a CPU, all backends on a GPU, and Hopper's kernel compiled without one.
"""

import pytest
import torch
from kernel_testing import draw, error, formula, interpreted, needs_hopper
from tensor_cores import CORES, run_cublas_here

from accel.kernels.split_attention import cublas, split_attention
from accel.kernels.split_linear import split

SHAPES = ((2, 70, 2, 72), (1, 130, 3, 64), (1, 33, 1, 72), (1, 1, 1, 72))  # (N, T, H, d)


def check(n, tokens, heads, dim, backend, device="cpu"):
    """Check flat weights, sharp weights, and a few keys that are much larger than the rest."""
    for sharpness in (1, 30):
        qkv = draw(n, tokens, 3 * heads * dim, seed=tokens, device=device)
        qkv[..., : 2 * heads * dim] *= sharpness**0.5
        qkv[:, ::7, heads * dim : 2 * heads * dim] *= 3
        halves = split(qkv, per_row=False)
        want, float32 = (
            formula(qkv, heads, dtype=dtype) for dtype in (torch.float64, torch.float32)
        )
        got = split_attention(halves, heads, backend)
        assert got.scale is None and got.pair.shape == (2, n, tokens, heads * dim)
        assert error(got.value(torch.float64), want) <= max(5 * error(float32, want), 1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference(shape):
    check(*shape, "torch")


def check_cublas(patch, shapes):
    run_cublas_here(patch)
    patch.setattr(cublas, "MAX_SCORE_BYTES", 3 * 4 * 70 * 70)  # three heads at once, of four
    for shape in shapes:
        check(*shape, "cublas")


def check_values_of_one_sign(patch, capability):
    """Weights and values of one sign make sums that tensor cores cut in one direction:
    without its mean v has none.
    """
    run_cublas_here(patch, capability)
    qkv = draw(1, 256, 3 * 24)
    qkv[..., 48:] += 3
    halves = split(qkv, per_row=False)
    want = formula(qkv, 1)
    assert error(split_attention(halves, 1, "cublas").value(torch.float64), want) <= 1e-6
    without = "accel.kernels.split_attention.triton.centre"
    patch.setattr(without, lambda pair, heads: torch.zeros(1, heads, 24))
    assert error(split_attention(halves, 1, "cublas").value(torch.float64), want) > 1e-6


def interpret():
    with pytest.MonkeyPatch.context() as patch:
        check_cublas(patch, SHAPES[::3])
    for capability in [*CORES][:4]:  # the last has the core before it
        with pytest.MonkeyPatch.context() as patch:
            check_values_of_one_sign(patch, capability)


def test_interpreted_kernel():
    interpreted("test_split_attention.interpret()")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ("cublas", "hopper"))
def test_backends_on_a_gpu(backend):
    if backend == "hopper":
        needs_hopper()
    for shape in (
        *SHAPES,
        (3, 17, 2, 72),
        (2, 256, 16, 72),
        (1, 1000, 5, 72),
        (2, 1024, 16, 72),
        (1, 4096, 3, 72),
    ):
        if backend != "hopper" or shape[-1] == 72:
            check(*shape, backend, "cuda")
    qkv = split(draw(2, 700, 3 * 4 * 72, device="cuda"), per_row=False)
    first = split_attention(qkv, 4, backend).pair
    assert all(torch.equal(split_attention(qkv, 4, backend).pair, first) for _ in range(3)), (
        "the same bits every time"
    )
