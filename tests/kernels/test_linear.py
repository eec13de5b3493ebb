"""The linear layer's backends against float64, and the tanh form of GELU."""

import pytest
import torch
import torch.nn.functional as F

from accel.kernels.linear import Linear, Tuner
from accel.precision import true_float32


def case(m, n, k, dtype, device, lead=()):
    generator = torch.Generator().manual_seed(m + n + k)
    x, weight, bias = (
        torch.randn(shape, generator=generator) for shape in ((*lead, m, k), (n, k), (n,))
    )
    return x.to(device, dtype), (weight / k**0.5).to(device, dtype), bias.to(device, dtype)


def formula(x, weight, bias, gelu):
    y = x.double() @ weight.double().t() + bias.double()
    return 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3))) if gelu else y


@pytest.mark.parametrize("gelu", (False, True))
def test_the_reference(gelu):
    x, weight, bias = case(7, 24, 40, torch.float64, "cpu", (3,))
    layer = Linear(weight, bias, gelu)
    torch.testing.assert_close(layer(x), formula(x, weight, bias, gelu), rtol=1e-12, atol=1e-12)
    assert layer.shape(21) == (21, 24, 40, gelu) and list(layer.parameters()) == [weight, bias]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", ((torch.float16, 5e-4), (torch.bfloat16, 4e-3)))
@pytest.mark.parametrize("gelu", (False, True))
@pytest.mark.parametrize(
    "m, n, k",
    ((4096, 4608, 1152), (4096, 1152, 4608), (64, 648, 216), (16, 1536, 384), (9, 864, 216)),
)
def test_every_backend_on_a_gpu(m, n, k, gelu, dtype, tolerance, tmp_path):
    x, weight, bias = case(m, n, k, dtype, "cuda", (2,))
    want = formula(x, weight, bias, gelu)
    for backend in ("torch", "epilogue", "tuned"):
        got = Linear(weight, bias, gelu, Tuner([tmp_path]), backend)(x)
        assert (
            got.shape == want.shape and (got.double() - want).norm() <= tolerance * want.norm()
        ), backend


@pytest.mark.gpu
def test_the_epilogue_is_the_tanh_form():
    """In float32 the two forms of GELU lie 1.5e-4 apart, far over the rounding."""
    x, weight, bias = case(256, 512, 128, torch.float32, "cuda")
    with true_float32():
        got = Linear(weight, bias, True, backend="epilogue")(x).double()
    assert (got - formula(x, weight, bias, True)).norm() < 1e-5 * got.norm()
    assert (
        got - F.gelu(x.double() @ weight.double().t() + bias.double())
    ).norm() > 5e-5 * got.norm()
