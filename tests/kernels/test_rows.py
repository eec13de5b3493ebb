"""Passes over rows of the residual stream: against float64, through Triton's interpreter on a CPU
and compiled on a GPU.
"""

import pytest
import torch
from kernel_testing import draw, error, interpreted

from accel.kernels.adaln import Modulation
from accel.kernels.rows import row_squares, silu_sum


def check(device, width, tokens):
    x, first, second = draw(3, 2, tokens, width, device=device)
    x = 40 * x  # e^88 is beyond float32
    entry = torch.tensor([2, 0], device=device)
    modulation = Modulation(draw(3, 7, width, seed=1, device=device), entry)
    for dtype, tolerance in (
        (torch.float32, 1e-6),
        (torch.float16, 4e-4),
        (torch.bfloat16, 5e-3),
    ):
        branches = ((first.to(dtype), 2), (second.to(dtype), 5))
        wide = Modulation(modulation.table.double(), entry)
        want = silu_sum(x.double(), wide, 6, branches, backend="torch")
        got = silu_sum(x, modulation, 6, branches, dtype, "triton")
        assert got.dtype == dtype and error(got, want) <= tolerance
    squares = row_squares(x, "triton")
    assert squares.shape == (1, 2 * tokens)
    assert error(squares, x.double().square().sum(-1).view(1, -1)) <= 1e-6


def test_the_reference_is_the_formula():
    x, first, second = draw(3, 2, 3, 5).double()
    table = draw(1, 4, 5, seed=1).double()
    modulation = Modulation(table, torch.zeros(2, dtype=torch.int64))
    total = x + table[0, 1] * first + table[0, 3] * second + table[0, 2]
    want = total / (1 + torch.exp(-total))
    got = silu_sum(x, modulation, 2, ((first, 1), (second, 3)))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert error(row_squares(x), (x * x).sum(-1).view(1, -1)) <= 1e-12


def test_interpreted_kernels():
    interpreted("test_rows.check('cpu', 1152, 3)")
    interpreted("test_rows.check('cpu', 100, 1)")


@pytest.mark.gpu
@pytest.mark.parametrize("width", (384, 1152, 2048, 100))
def test_compiled_kernels(width):
    check("cuda", width, 300)
