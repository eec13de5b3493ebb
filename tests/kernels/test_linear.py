"""Compare the backends of the linear layer, with all epilogues, with float64."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from kernel_testing import error, needs_hopper

from accel.kernels.linear import Linear, Tuner, hopper
from accel.kernels.rows import row_squares
from accel.runtime.precision import true_float32

EPS = 1e-5
EPILOGUES = ("", "gelu", *hopper.FUSED_EPILOGUES)
# (rows of a batch, tokens of a row, N, K, head dim): ragged tiles, a depth that is no multiple of
# 64, tokens that our kernel does not rotate, one stage, widths that are used
SHAPES = (
    (3, 64, 1152, 200, 64),
    (5, 17, 432, 72, 72),
    (1, 32, 384, 64, 64),
    (2, 256, 3456, 1152, 72),
    (9, 256, 6144, 2048, 128),
)


def case(m, n, k, dtype, device, lead=()):
    generator = torch.Generator().manual_seed(m + n + k)
    x, weight, bias = (
        torch.randn(shape, generator=generator) for shape in ((*lead, m, k), (n, k), (n,))
    )
    return x.to(device, dtype), (weight / k**0.5).to(device, dtype), bias.to(device, dtype)


def beside(epilogue, rows, tokens, n, head, dtype, device):
    """Return the arguments of a layer with this epilogue, and the arguments of its calls."""
    generator = torch.Generator().manual_seed(n)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device)

    wide = torch.promote_types(dtype, torch.float32)
    if epilogue == "rotate":
        return dict(rotation=draw(tokens + 7, head // 2, 2).to(wide)), dict(first=7)
    if epilogue == "modulate":
        stream = 3 * draw(rows, tokens, n // 2).to(wide)
        return {}, dict(stream=stream, squares=row_squares(stream), eps=EPS)
    if epilogue == "residual":
        gates = draw(rows, tokens, 3, n).to(dtype)
        return {}, dict(stream=draw(rows, tokens, n).to(wide), gate=gates[:, :, 1])
    return {}, {}


def formula(x, weight, bias, epilogue, rotation=None, **given):
    """Return the result in float64 by definition; for "residual" the new stream."""
    y = x.double() @ weight.double().t() + bias.double()
    if epilogue == "gelu":
        return 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3)))
    if epilogue == "silu":
        return y / (1 + torch.exp(-y))
    if epilogue == "swiglu":
        a, b = y.chunk(2, -1)
        return a / (1 + torch.exp(-a)) * b
    if epilogue == "rotate":
        *turned, v = y.chunk(3, -1)
        angles = torch.view_as_complex(rotation[given["first"] :].double())[:, None]  # (t, 1, d/2)
        for part, values in enumerate(turned):
            pairs = values.unflatten(-1, (-1, angles.shape[-1], 2))
            turned[part] = torch.view_as_real(torch.view_as_complex(pairs) * angles).flatten(2)
        return torch.cat([*turned, v], -1)
    if epilogue == "modulate":
        scale, shift = y.chunk(2, -1)
        t = given["stream"].double()
        return t / (t.square().mean(-1, keepdim=True) + EPS).sqrt() * (1 + scale) + shift
    if epilogue == "residual":
        return given["stream"].double() + given["gate"].double() * y
    return y


def check(shape, epilogue, dtype, device, tolerance, backend, tuner=None):
    """Check a layer's result; uninitialised memory must not change it."""
    rows, tokens, n, k, head = shape
    x, weight, bias = case(tokens, n, k, dtype, device, (rows,))
    options, given = beside(epilogue, rows, tokens, n, head, dtype, device)
    want = formula(x, weight, bias, epilogue, **options, **given)
    layer = Linear(weight, bias, epilogue, tuner=tuner, backend=backend, **options)
    if epilogue == "residual":
        given["stream"] = given["stream"].clone()
        squares = layer(x, **given)
        got = given["stream"]
        assert error(squares.sum(0), want.square().sum(-1).flatten()) <= max(1e-5, tolerance / 10)
        assert error(got, want) <= tolerance
        return
    got = layer(x, **given)
    assert got.shape == want.shape and got.dtype == dtype and got.isfinite().all()
    assert error(got, want) <= tolerance


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_the_reference(shape, epilogue):
    check(shape, epilogue, torch.float64, "cpu", 1e-6 if epilogue == "modulate" else 1e-12, "torch")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", ((torch.float16, 6e-4), (torch.bfloat16, 5e-3)))
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("shape", (*SHAPES, (16, 256, 4608, 1152, 128), (1, 9, 864, 216, 72)))
def test_every_backend_on_a_gpu(shape, epilogue, dtype, tolerance, tmp_path):
    backends = ["torch", "epilogue", "tuned"]
    if epilogue in hopper.FUSED_EPILOGUES and torch.cuda.get_device_capability() == (9, 0):
        backends.append("hopper")
    for backend in backends:
        check(shape, epilogue, dtype, "cuda", tolerance, backend, Tuner([tmp_path]))


VARIANTS = [*product(hopper.TILES, hopper.FUSED_EPILOGUES)]


@pytest.mark.gpu
@pytest.mark.parametrize("tile, epilogue", VARIANTS)
def test_every_tile_gives_the_same_bits(tile, epilogue, monkeypatch):
    """Repeated runs give the same bits: the order of summation is fixed."""
    needs_hopper()
    monkeypatch.setattr(hopper, "choose_tile", lambda *_: tile)
    shape = 7, 128, 1152, 328, 72
    rows, tokens, n, k, head = shape
    x, weight, bias = case(tokens, n, k, torch.float16, "cuda", (rows,))
    options, given = beside(epilogue, rows, tokens, n, head, torch.float16, "cuda")
    layer = Linear(weight, bias, epilogue, **options)
    results = []
    for _ in range(20):
        again = {name: value.clone() for name, value in given.items() if name == "stream"}
        results.append(layer(x, **given | again))
    assert all(torch.equal(result, results[0]) for result in results)
    assert layer.backend == "hopper"


@pytest.mark.gpu
def test_the_epilogue_is_the_tanh_form():
    """The two forms of GELU differ in float32 by 1.5e-4, far more than the rounding."""
    x, weight, bias = case(256, 512, 128, torch.float32, "cuda")
    with true_float32():
        got = Linear(weight, bias, "gelu", backend="epilogue")(x).double()
    assert (got - formula(x, weight, bias, "gelu")).norm() < 1e-5 * got.norm()
    assert (
        got - F.gelu(x.double() @ weight.double().t() + bias.double())
    ).norm() > 5e-5 * got.norm()
