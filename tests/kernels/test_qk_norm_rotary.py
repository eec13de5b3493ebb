"""Norm and rotation of queries and keys against their formulas, the kernel against the
reference through Triton's interpreter on a CPU and compiled on a GPU.
"""

import pytest
import torch
from kernel_testing import draw, error, interpreted

from accel.families.large_dit.network import rotation_table
from accel.kernels.qk_norm_rotary import qk_norm_rotary, qk_norm_rotary_split

# N, t, heads, head dim; an interpreter's time is a token's
CASES = ((1, 3, 2, 96), (2, 2, 4, 48), (1, 2, 3, 128), (1, 2, 2, 80))
LARGE = ((2, 256, 32, 96), (2, 256, 32, 128), (16, 64, 32, 48), (2, 288, 16, 80))
TOTAL = 400  # positions


def case(n, tokens, heads, dim, device="cpu"):
    width = heads * dim
    # with a mean, which a one-pass variance would lose
    qkv = 3 * draw(n, tokens, 3 * width, device=device) + 1
    norms = draw(2, 2, width, seed=1, device=device)
    return qkv, rotation_table(dim, TOTAL, torch.float32, torch.device("cpu")).to(device), norms


def check(device, cases=CASES):
    for shape in cases:
        qkv, rotation, norms = case(*shape, device)
        for dtype, tolerance in (
            (torch.float32, 1e-6),
            (torch.float16, 4e-4),
            (torch.bfloat16, 5e-3),
        ):
            for norm in (norms, None):
                for first, eps in ((0, None), (31, 1e-6)):
                    one = qkv.to(dtype)
                    wide = None if norm is None else norm.double()
                    want = qk_norm_rotary(
                        one.double(), rotation.double(), first, wide, eps, "torch"
                    )
                    before = one.clone()
                    got = qk_norm_rotary(one, rotation, first, norm, eps, "triton")
                    assert got is one and error(got, want) <= tolerance
                    v = 2 * qkv.shape[-1] // 3
                    assert torch.equal(got[..., v:], before[..., v:])  # values are not touched


def check_split(device, backend="triton", cases=CASES):
    """q, k and v as halves; a value too large for float16 is reported, be it one of a value's."""
    for shape in cases:
        qkv, rotation, norms = case(*shape, device)
        for norm, first, eps in ((norms, 31, None), (norms, 0, 1e-6), (None, 0, None)):
            wide = None if norm is None else norm.double()
            want = qk_norm_rotary(qkv.double(), rotation.double(), first, wide, eps, "torch")
            for large in (False, True):
                given = qkv.clone()
                overflow = torch.zeros(1, dtype=torch.int32, device=device)
                given[-1, -1, -1] += 1e6 * large
                got = qk_norm_rotary_split(given, rotation, overflow, first, norm, eps, backend)
                assert (
                    got.scale is None
                    and got.pair.shape == (2, *qkv.shape)
                    and int(overflow) == large
                )
                assert bool(got.pair.isfinite().all()) != large
                assert large or error(got.value(torch.float64), want) <= 1e-6


def test_the_split_reference():
    check_split("cpu", "torch")


@pytest.mark.parametrize("norm", (False, True, "over each head"))
def test_the_reference_is_the_formula(norm):
    n, tokens, heads, dim = CASES[0]
    qkv, _, norms = (one.double() for one in case(*CASES[0]))
    rotation = rotation_table(dim, TOTAL, torch.float64, torch.device("cpu"))
    first = 11
    parts = list(qkv.clone().chunk(3, dim=-1))
    for part in (0, 1):
        x = parts[part]
        if norm == "over each head":
            x = x.unflatten(-1, (heads, dim))
            x = (x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()).flatten(2) * norms[
                part, 0
            ] + norms[part, 1]
        elif norm:
            x = x - x.mean(-1, keepdim=True)
            x = (
                x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norms[part, 0]
                + norms[part, 1]
            )
        numbers = torch.view_as_complex(x.reshape(n, tokens, heads, dim // 2, 2))
        position = torch.arange(first, first + tokens).double()
        i = torch.arange(dim // 2).double()
        angle = position[:, None, None] * 10000.0 ** (-2 * i / dim)
        parts[part] = torch.view_as_real(
            torch.polar(torch.ones_like(angle), angle) * numbers
        ).reshape(x.shape)
    eps = 1e-6 if norm == "over each head" else None
    got = qk_norm_rotary(qkv, rotation, first, norms if norm else None, rms_eps=eps)
    torch.testing.assert_close(got, torch.cat(parts, -1), rtol=1e-11, atol=1e-11)


def test_interpreted_kernel():
    interpreted("test_qk_norm_rotary.check('cpu'), test_qk_norm_rotary.check_split('cpu')")


@pytest.mark.gpu
def test_compiled_kernel():
    check("cuda", (*CASES, *LARGE))
    check_split("cuda", "triton", (*CASES, *LARGE))
