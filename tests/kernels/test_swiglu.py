"""SwiGLU against its formula, its kernel against the reference through Triton's
interpreter on a CPU and compiled on a GPU.
"""

import pytest
import torch
from kernel_testing import draw, error, interpreted

from accel.kernels.split_linear.high_low import stacked
from accel.kernels.swiglu import swiglu, swiglu_split

WIDTHS = (11008, 1024, 768, 100)


def check(device, widths=WIDTHS):
    for width in widths:
        x = 3 * draw(2, 7, 2 * width, device=device)
        for dtype, tolerance in (
            (torch.float32, 1e-6),
            (torch.float16, 4e-4),
            (torch.bfloat16, 5e-3),
        ):
            one = x.to(dtype)
            got = swiglu(one, "triton")
            assert got.dtype == dtype and got.shape == (2, 7, width)
            assert error(got, swiglu(one.double(), "torch")) <= tolerance
        check_split(x)
    large = torch.full((1, 1, 8), 200.0, device=device)
    large[..., :2] = -200.0  # e^200 is beyond float32
    assert swiglu(large, "triton").tolist() == [[[0.0, 0.0, 40000.0, 40000.0]]]


def check_split(x, backend="triton"):
    """High and low with a scale a token, also where tokens differ by 1e+8 in size; in
    both layouts.
    """
    x = x * torch.logspace(-4, 4, x.shape[1], device=x.device)[:, None]
    want = swiglu(x.double(), "torch")
    got = swiglu_split(x, backend)
    assert ((got.value(torch.float64) - want).norm(dim=-1) <= 1e-6 * want.norm(dim=-1)).all()
    stack = swiglu_split(x, backend, stack=True)
    assert torch.equal(stacked(stack.pair), stacked(got.pair)) and torch.equal(
        stack.scale, got.scale
    )
    assert backend == "torch" or stacked(stack.pair).data_ptr() == stack.pair.data_ptr()


def test_the_split_reference():
    check_split(draw(2, 7, 200), "torch")


def test_the_reference_is_the_formula():
    a = draw(3, 5, seed=1).double()
    b = draw(3, 5, seed=2).double()
    want = a / (1 + torch.exp(-a)) * b
    torch.testing.assert_close(swiglu(torch.cat([a, b], -1)), want, rtol=1e-12, atol=1e-12)
    half = torch.cat([a, b], -1).half()
    assert torch.equal(swiglu(half), swiglu(half.double()).half())  # rounded once


def test_interpreted_kernel():
    interpreted("test_swiglu.check('cpu', (1024, 100))")


@pytest.mark.gpu
def test_compiled_kernel():
    check("cuda")
