"""The fused adaLN kernel against float64, through Triton's interpreter on a CPU and
compiled on a GPU.
"""

import pytest
import torch
from kernel_testing import draw, interpreted

from accel.kernels.adaln import Modulation, adaln, adaln_split
from accel.kernels.adaln import triton as kernels
from accel.kernels.split_linear.high_low import stacked

WIDTHS = (1152, 216, 384, 768, 1024, 100)
# (N, T): odd shapes, one token, more tokens of a sample than a program computes and a
# last program that has fewer.
SHAPES = ((2, 9), (1, 1), (3, 64), (5, 17))
RMS_EPS = 1e-5


def case(width, n, tokens, branches, dtype, device, by_token=False):
    x, *added = draw(1 + branches, n, tokens, width, device=device)
    x = x * 3 + 5  # a mean that a one-pass variance would lose
    entry = torch.arange(n, device=device) * 2 % 3  # shared between samples, out of order
    if by_token:
        entry = torch.arange(n * tokens, device=device).view(n, tokens) * 3 % 4
    table = draw(4, 8, width, seed=1, device=device)[:, 2:]  # a later stage's vectors
    table = table.to(dtype) if by_token else table
    return x, Modulation(table, entry), [*zip((one.to(dtype) for one in added), (2, 5))]


def wide(modulation):
    return Modulation(modulation.table.double(), modulation.entry)


def check(width, n, tokens, branches, dtype, device, tolerance, rms_eps=None, by_token=False):
    x, modulation, pairs = case(width, n, tokens, branches, dtype, device, by_token)
    if rms_eps:
        x *= 1e-3  # where ε matters
    exact = x.double()
    before = x.clone()
    want = adaln(exact, wide(modulation), 3, pairs, rms_eps, backend="torch")
    got = adaln(x, modulation, 3, pairs, rms_eps, dtype, "triton")
    assert got.dtype == dtype and got.isfinite().all()
    assert (got.double() - want).norm() <= tolerance * want.norm()
    if branches == 2:  # x is updated
        assert (x - exact).norm() <= 1e-6 * exact.norm() and not torch.equal(x, before)
    else:
        assert torch.equal(x, before)


def check_split(backend, device="cpu", tokens=20):
    """Check high and low with a scale per token, for tokens that differ by a factor of 1e+8."""
    by_row = torch.tensor([2, 0, 1], device=device)
    by_token = torch.arange(3 * tokens, device=device).view(3, tokens) % 3
    for width, rms_eps, entry in (
        (1152, None, by_row),
        (216, RMS_EPS, by_token),
        (100, None, by_token),
        (100, RMS_EPS, by_row),
    ):
        x, branch = (draw(3, tokens, width, seed=seed, device=device) for seed in (width, 2))
        table = draw(4, 6, width, seed=1, device=device)
        table[2] *= 1e-4
        table[0, 3:5] *= 1e4
        modulation = Modulation(table, entry)
        want = adaln(
            x.double(), wide(modulation), 3, ((branch.double(), 2),), rms_eps, backend="torch"
        )
        got, stack = (
            adaln_split(x.clone(), modulation, 3, ((branch, 2),), rms_eps, stack, backend)
            for stack in (False, True)
        )
        assert got.scale.shape == (3, tokens) and got.pair[0].abs().amax(-1).ge(2**14).all()
        assert ((got.value(torch.float64) - want).norm(dim=-1) <= 1e-6 * want.norm(dim=-1)).all()
        assert torch.equal(stacked(stack.pair), stacked(got.pair)) and torch.equal(
            stack.scale, got.scale
        )
        assert backend == "torch" or stacked(stack.pair).data_ptr() == stack.pair.data_ptr()


@pytest.mark.parametrize("by_token", (False, True))
@pytest.mark.parametrize("branches, rms_eps", ((0, None), (1, None), (2, None), (2, RMS_EPS)))
def test_the_reference_is_the_formula(branches, rms_eps, by_token):
    """Vector 3 is the shift and 4 the scale."""
    x, modulation, pairs = case(216, 3, 10, branches, torch.float64, "cpu", by_token)
    entry = modulation.entry if by_token else modulation.entry[:, None].expand(3, 10)
    row = modulation.table[entry].double().transpose(1, 2)  # (N, V, T, D)
    total = x.double() + sum(row[:, gate] * branch.double() for branch, gate in pairs)
    centred = total if rms_eps else total - total.mean(-1, keepdim=True)
    want = (
        centred
        / (centred.pow(2).mean(-1, keepdim=True) + (rms_eps or 1e-6)).sqrt()
        * (1 + row[:, 4])
        + row[:, 3]
    )
    got = adaln(x.double(), wide(modulation), 3, pairs, rms_eps, backend="torch")
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_the_split_reference():
    check_split("torch")


def interpret():
    tile_config = kernels.tile_config
    # both forms
    kernels.tile_config = lambda width, tokens: tile_config(width, 8192 if tokens > 1 else tokens)
    for width in WIDTHS:
        for n, tokens in ((2, 3), (1, 1)):  # an interpreter takes its time for a token
            for branches in (0, 1, 2):
                check(width, n, tokens, branches, torch.float16, "cpu", 3e-4)
                check(width, n, tokens, branches, torch.float16, "cpu", 3e-4, by_token=True)
                if width in (1152, 216):
                    # The interpreter cuts float32 to bfloat16 where hardware rounds:
                    # twice the error.
                    check(width, n, tokens, branches, torch.bfloat16, "cpu", 5e-3)
                    check(width, n, tokens, branches, torch.float32, "cpu", 1e-6)
                    check(width, n, tokens, branches, torch.float32, "cpu", 1e-6, RMS_EPS)
                    check(width, n, tokens, branches, torch.float32, "cpu", 1e-6, RMS_EPS, True)
    kernels.tile_config = tile_config
    check_split("triton", tokens=5)


def test_interpreted_kernel():
    interpreted("test_adaln.interpret()")


@pytest.mark.gpu
@pytest.mark.parametrize("branches", (0, 1, 2))
@pytest.mark.parametrize("width", (*WIDTHS, 1536, 2304, 3072, 4096))
def test_compiled_kernel(width, branches):
    for n, tokens in (*SHAPES, (16, 1024), (1009, 9)):
        check(width, n, tokens, branches, torch.float16, "cuda", 3e-4)
        check(width, n, tokens, branches, torch.float16, "cuda", 3e-4, RMS_EPS)
        check(width, n, tokens, branches, torch.float16, "cuda", 3e-4, RMS_EPS, True)
        if width in (1152, 216):
            check(width, n, tokens, branches, torch.bfloat16, "cuda", 2.5e-3)
            check(width, n, tokens, branches, torch.float32, "cuda", 1e-6)


@pytest.mark.gpu
def test_compiled_split():
    check_split("triton", "cuda")
