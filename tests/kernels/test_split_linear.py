"""High and low, and the split linear layer, against float64: the reference, Triton's
kernel through its interpreter on a CPU, all backends on a GPU, and Hopper's kernel
compiled without one.
"""

import pytest
import torch
import torch.nn.functional as F
from kernel_testing import draw, error, interpreted, needs_hopper
from tensor_cores import CORES, run_cublas_here

from accel.kernels.split_linear import (
    HighLow,
    SplitLinear,
    balance,
    cublas,
    split,
    split_rows,
)
from accel.kernels.split_linear.high_low import new_stack, stacked

SHAPES = ((1, 8, 8), (9, 216, 72), (70, 72, 216), (33, 200, 64))  # (M, N, K)


@pytest.mark.parametrize("magnitude", (1e-30, 1e-6, 1.0, 1e10, 3e38))
def test_high_and_low_hold_22_bits(magnitude):
    """Elements down to 2⁻¹⁷ of a row's largest keep a relative error of 2⁻²², smaller
    ones an absolute error of 2⁻³⁹ of that.
    """
    x = draw(50, 300) * torch.logspace(0, -12, 300)
    x = x / x.abs().amax(-1, keepdim=True) * magnitude
    halves = split(x)
    largest = x.abs().amax(-1, keepdim=True).double()
    assert halves.pair.dtype == torch.float16 and halves.pair.isfinite().all()
    assert torch.equal(torch.frexp(halves.scale).mantissa, torch.full((50,), 0.5)), (
        "a scale is a power of two"
    )
    off = (halves.value(torch.float64) - x.double()).abs()
    assert (off <= torch.maximum(x.double().abs() * 2.0**-22, largest * 2.0**-39)).all()
    high = halves.pair[0].abs().float()
    assert (high.amax(-1) >= 2**14).all() and (high.amax(-1) <= 2**15).all()


def test_rows_near_the_end_of_float32_stay_what_they_are():
    """The scale of such a row would overflow or underflow float32."""
    x = torch.tensor([[1e-36, -3e-37], [1e-38, 2e-40], [1e-44, 0.0], [0.0, 0.0]])
    assert torch.allclose(split(x).value(torch.float64), x.double(), rtol=1e-6, atol=1e-44)


def test_balance_changes_no_bit():
    """Powers of two, so float32 scales exactly; they bring rows of any size to the same."""
    weight = draw(6, 300) * torch.tensor([1e-20, 1e-4, 1, 1e3, 1e15, 0.0])[:, None]
    bias = draw(6) * 1e-6
    bias[5] = 0
    factor = balance(weight, bias)
    assert torch.equal(torch.frexp(factor).mantissa, torch.full((6,), 0.5)) and factor[5] == 1
    size = (
        (weight * factor[:, None]).double().square().sum(1) + (bias * factor).double().square()
    ).sqrt()
    assert ((size[:5] > 2.8) & (size[:5] < 5.7)).all()
    assert torch.equal(weight * factor[:, None] / factor[:, None], weight)


def check_linear(m, n, k, backend, device="cpu"):
    """Rows of 1e-4 and of 1e+3 in one matrix, a token and a channel of 1e+4: every output
    channel and every token by itself within float32's reach; and GELU's high and low,
    whose scale is the layer's own.
    """
    x, weight, bias = (
        draw(*shape, seed=shape[0], device=device) for shape in ((m, k), (n, k), (n,))
    )
    x[0] *= 1e4
    x[:, 1] *= 1e4
    weight[: n // 2] *= 1e-4
    weight[n // 2 :] *= 1e3

    def reach(x):
        """Σ|x·w|, float32's own yardstick: a sum that cancels has no relative accuracy in
        any arithmetic.
        """
        return x.double().abs() @ weight.double().abs().t() + bias.double().abs()

    def exact(x):
        return x.double() @ weight.double().t() + bias.double()

    # Of one large GEMM among small ones: rounding to high and low, low·low, and what the
    # tensor core cuts off while it is in the accumulator. float32 itself: 1.2e-6; 72 cuts
    # of 2⁻²³: 9e-6
    tolerance = {"torch": 8e-7, "cublas": 1e-5}.get(backend, 2e-6)
    summed = 2e-6 if backend == "cublas" else 1e-6  # the longest sum in a core's accumulators
    layer = SplitLinear(weight, bias, backend=backend)
    got = layer(split(x))
    assert got.dtype == torch.float32 and got.shape == (m, n)
    assert ((got.double() - exact(x)).abs() <= tolerance * reach(x)).all()

    x = draw(m, k, seed=m, device=device)
    after = balance(weight, bias)
    bare = layer(split(x, per_row=False))  # without scales, as GELU and attention give them
    assert ((bare.double() - exact(x)).abs() <= tolerance * reach(x)).all()

    overflow = torch.zeros(1, dtype=torch.int32, device=device)
    how = dict(overflow=overflow, backend=backend)
    got = SplitLinear(weight, bias, gelu_scale=after, **how)(split(x))
    assert got.scale is None and got.pair.shape == (2, m, n) and int(overflow) == 0
    want = F.gelu(exact(x), approximate="tanh") * after.double()
    assert error(got.value(torch.float64), want) < 1e-6 + summed  # float32's tanh loses as much
    got = SplitLinear(weight * after[:, None], bias * after, **how)(split(x))
    assert (
        error(got.value(torch.float64), exact(x) * after.double()) < summed and int(overflow) == 0
    )


def check_overflow(backend, device="cpu"):
    """A result above 65504 is reported, even if it is one in a thousand."""
    weight, x = (draw(n, 64, seed=seed, device=device) for n, seed in ((64, 1), (40, 2)))
    one = torch.ones(64, device=device)
    for row, expected in ((None, 0), (39, 1)):
        if row is not None:
            x[row] *= 1e5
        for gelu_scale in (None, one):
            overflow = torch.zeros(1, dtype=torch.int32, device=device)
            layer = SplitLinear(
                weight, 0 * one, overflow=overflow, gelu_scale=gelu_scale, backend=backend
            )
            finite = bool(layer(split(x)).pair.isfinite().all())
            assert int(overflow) == expected and finite == (not expected)


def check_half(m, n, k, backend, device="cpu"):
    """Without low parts a layer has the error of half-precision operands, whatever their size."""
    weight = draw(n, k, seed=1, device=device) * 1e-6
    bias = draw(n, seed=2, device=device)
    x = draw(m, k, seed=3, device=device) * 1e6
    whole = SplitLinear(weight, bias, backend=backend)
    layer = SplitLinear(weight, bias, low=False, backend=backend)
    assert len(layer.pair) == 1
    want = F.linear(x.double(), weight.double(), bias.double())
    assert 1e-4 < error(layer(split(x)), want) < 4e-4
    high, low = split(x).pair
    without = HighLow(torch.stack([high, 0 * low]), split(x).scale)
    assert torch.equal(layer(split(x)), layer(without))
    assert error(whole(split(x)), want) < 1e-6


@pytest.mark.parametrize("m, n, k", SHAPES)
def test_the_reference(m, n, k):
    check_linear(m, n, k, "torch")


def test_the_reference_in_half_precision():
    check_half(40, 64, 256, "torch")


def test_overflow_is_reported():
    check_overflow("torch")


def check_cublas(patch):
    run_cublas_here(patch)
    patch.setattr(cublas, "OTHER_PIECE", 64)  # more than one, in some shapes
    for shape in SHAPES:
        check_linear(*shape, "cublas")
    check_overflow("cublas")


def relative_error(capability, depth):
    """Return the error of a layer on emulated tensor cores, for normal inputs and weights."""
    x = draw(16, depth, seed=1)
    weight = draw(16, depth, seed=2)
    bias = torch.zeros(16)
    return error(
        SplitLinear(weight, bias, backend="cublas")(split(x)), x.double() @ weight.double().t()
    )


def check_pieces(patch, capability):
    """Pieces are as long as the generation's sums allow: within 2e-6 of float64 at XL's
    depths; twice as long they are not.
    """
    run_cublas_here(patch, capability)
    assert max(relative_error(capability, depth) for depth in (1152, 4608)) <= 2e-6
    piece = cublas.PIECE.get(capability, cublas.OTHER_PIECE)
    patch.setitem(cublas.PIECE, capability, 2 * piece)
    assert relative_error(capability, 4608) > 2e-6


def check_split_rows(device="cpu"):
    """Triton's kernel gives the bits of `split`, in both layouts, of any strides."""
    x = draw(3, 200, 7, device=device).mT * torch.logspace(-30, 30, 7, device=device)[:, None]
    x[0, 0] = 0
    assert not x.is_contiguous()
    want = split(x)
    for stack in (False, True):
        got = split_rows(x, stack, backend="triton")
        assert torch.equal(got.pair, want.pair) and torch.equal(got.value(), want.value())
    assert torch.equal(stacked(got.pair)[..., 400:], want.pair[0])


def interpret():
    check_split_rows()
    with pytest.MonkeyPatch.context() as patch:
        check_cublas(patch)
    for capability in CORES:
        with pytest.MonkeyPatch.context() as patch:
            check_pieces(patch, capability)


def test_interpreted_kernel():
    interpreted("test_split_linear.interpret()")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ("cublas", "hopper"))
def test_backends_on_a_gpu(backend):
    if backend == "hopper":
        needs_hopper()
    for shape in (
        *SHAPES,
        (4096, 1152, 1152),
        (2048, 3456, 1152),
        (1000, 1152, 4608),
        (129, 4608, 1152),
    ):
        check_linear(*shape, backend, "cuda")
    check_overflow(backend, "cuda")
    check_split_rows("cuda")
    x = split(draw(5, 64, seed=1, device="cuda"))
    layer = SplitLinear(*draw(8, 65, device="cuda").split([64, 1], 1))
    stack = new_stack(5, 64, device="cuda").copy_(x.pair)  # as cuBLAS's attention leaves it
    assert torch.equal(layer(HighLow(stack, x.scale)), layer(x))
    if backend == "hopper":
        check_half(1000, 2048, 768, "hopper", "cuda")
        check_few_rows()


def check_few_rows():
    """Few rows give the same bits as the same rows in a large batch."""
    x = split(draw(200, 1152, seed=1, device="cuda"))
    layer = SplitLinear(*draw(1000, 1153, device="cuda").split([1152, 1], 1))
    whole = layer(x)
    for rows in (1, 2, 64):
        few = HighLow(x.pair[:, :rows].contiguous(), x.scale[:rows])
        assert torch.equal(layer(few), whole[:rows])
