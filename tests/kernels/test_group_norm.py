"""The decoder's kernels against float64, through Triton's interpreter on a CPU and
compiled on a GPU.
"""

import pytest
import torch
from kernel_testing import interpreted

from accel.kernels.group_norm import add, group_norm
from accel.kernels.group_norm import triton as kernels

# (C, groups, H, W): a chunk that ends inside a tile, one place, a width of the demo's
# that is no power of two, more channels than a tile.
SHAPES = ((32, 32, 7, 5), (16, 4, 1, 1), (80, 16, 9, 8), (256, 32, 6, 6), (130, 13, 5, 6))


def case(channels, height, width, dtype, branch, device, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def picture(dtype, mean):
        x = torch.randn(1, channels, height, width, generator=generator) * 3 + mean
        return x.to(device, dtype).contiguous(memory_format=torch.channels_last)

    vectors = [torch.randn(channels, generator=generator).to(device) for _ in range(3)]
    # A mean that a one-pass variance would lose.
    return picture(dtype, 40.0), picture(torch.float16, 0.0) if branch else None, *vectors


def formula(x, bias, branch, weight, shift, groups, silu):
    """Return the result by definition, in float64."""
    total = x.double() + bias.double()[:, None, None] + (0 if branch is None else branch.double())
    grouped = total.reshape(1, groups, -1)
    centred = grouped - grouped.mean(-1, keepdim=True)
    normed = (centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()).view_as(total)
    y = normed * weight.double()[:, None, None] + shift.double()[:, None, None]
    return total, y * torch.sigmoid(y) if silu else y


def check(
    channels, groups, height, width, dtype, branch, written, silu, out, tolerance, device, backend
):
    x, branch, bias, weight, shift = case(channels, height, width, dtype, branch, device)
    before = x.clone()
    total = add(x, bias, branch, written, backend=backend)
    got = group_norm(total, weight, shift, groups, silu, out, backend=backend)
    # What was rounded on the way out was rounded after its statistics were taken; the
    # reference starts from the same.
    want_sum, want = formula(x, bias, branch, weight, shift, groups, silu)
    assert got.dtype == out and got.isfinite().all() and torch.equal(x, before)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert (got.double() - want).norm() <= tolerance * want.norm() + 1e-30
    if written is None:
        assert total.value is x
    else:
        assert total.value.dtype == written
        bound = 3e-4 if written == torch.float16 else 1e-6
        assert (total.value.double() - want_sum).norm() <= bound * want_sum.norm()
        last = add(x, bias, branch, written, statistics=False, backend=backend)
        assert torch.equal(last.value, total.value) and last.partial is None


# (dtype of x, branch, dtype of the sum, SiLU, dtype out, tolerance): the sums that the
# decoder makes, and one in float32 to hold to float32's bound.
FORMS = (
    (torch.float16, False, None, True, torch.float16, 4e-4),
    (torch.float32, True, torch.float32, True, torch.float16, 4e-4),
    (torch.float16, True, torch.float32, False, torch.float16, 4e-4),
    (torch.float32, True, torch.float32, True, torch.float32, 1e-6),
)


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_is_the_formula(form):
    for shape in SHAPES:
        # torch's own float32 statistics lose a digit to a mean of 40.
        check(*shape, *form[:-1], max(form[-1], 2e-5), "cpu", "torch")


def interpret():
    for number, shape in enumerate(SHAPES):
        for form in FORMS if number == 0 else FORMS[number % 2 :: 2]:
            check(*shape, *form, "cpu", "triton")
    kernels.PROGRAMS = 2  # chunks of several tiles, of which the last is cut
    check(80, 16, 9, 8, *FORMS[1], "cpu", "triton")
    check(32, 32, 13, 17, *FORMS[3], "cpu", "triton")


def test_interpreted_kernels():
    interpreted("test_group_norm.interpret()")


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_compiled_kernels(form):
    for shape in (*SHAPES, (128, 32, 512, 512), (512, 32, 64, 64), (256, 32, 255, 130)):
        check(*shape, *form, "cuda", "triton")
