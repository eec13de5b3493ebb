"""Split products and attention against float64: the twins, Triton's kernels through its interpreter on a CPU, all routes on a GPU, and Hopper's
kernels compiled without one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_attention import disassemble

from accel.kernels import cuda as hopper
from accel.kernels import split_attention as attention_module
from accel.kernels import split_linear as module
from accel.kernels.adaln import Modulation, norm_modulate
from accel.kernels.split_attention import split_attention
from accel.kernels.split_linear import SplitLinear, balance, split
from accel.kernels.split_linear import hopper as split_hopper

SHAPES = ((1, 8, 8), (9, 216, 72), (70, 72, 216), (33, 200, 64))  # (M, N, K)
HEADS = ((2, 70, 2, 72), (1, 130, 3, 64), (1, 33, 1, 72), (1, 1, 1, 72))  # (n, T, H, d)


def draw(*shape, seed=0, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


#################################################################################
#                              The terms themselves                             #
#################################################################################


@pytest.mark.parametrize("magnitude", (1e-30, 1e-6, 1.0, 1e10, 3e38))
def test_two_terms_hold_22_bits(magnitude):
    """Elements down to 2⁻¹⁷ of a row's largest keep a relative error of 2⁻²², smaller ones an absolute error of 2⁻³⁹ of that."""
    x = draw(50, 300) * torch.logspace(0, -12, 300)
    x = x / x.abs().amax(-1, keepdim=True) * magnitude
    terms = split(x)
    largest = x.abs().amax(-1, keepdim=True).double()
    assert terms.pair.dtype == torch.float16 and terms.pair.isfinite().all()
    assert torch.equal(torch.frexp(terms.scale).mantissa, torch.full((50,), 0.5)), "a scale is a power of two"
    off = (terms.value(torch.float64) - x.double()).abs()
    assert (off <= torch.maximum(x.double().abs() * 2.0**-22, largest * 2.0**-39)).all()
    high = terms.pair[0].abs().float()
    assert (high.amax(-1) >= 2**14).all() and (high.amax(-1) <= 2**15).all()


def test_a_row_of_zeros_and_rows_of_any_size_in_one_matrix():
    x = draw(4, 64) * torch.tensor([0.0, 1e-4, 1e3, 1e30])[:, None]
    assert torch.equal(split(x).value()[0], x[0])
    assert ((split(x).value(torch.float64) - x.double()).norm(dim=1)[1:] <= 2.0**-22 * x.double().norm(dim=1)[1:]).all()


def test_balance_changes_no_bit():
    """Powers of two, so float32 products scale exactly; they bring rows of any size to the same."""
    weight, bias = draw(6, 300) * torch.tensor([1e-20, 1e-4, 1, 1e3, 1e15, 0.0])[:, None], draw(6) * 1e-6
    bias[5] = 0
    factor = balance(weight, bias)
    assert torch.equal(torch.frexp(factor).mantissa, torch.full((6,), 0.5)) and factor[5] == 1
    size = ((weight * factor[:, None]).double().square().sum(1) + (bias * factor).double().square()).sqrt()
    assert ((size[:5] > 2.8) & (size[:5] < 5.7)).all()
    assert torch.equal(weight * factor[:, None] / factor[:, None], weight)


#################################################################################
#                                   Products                                    #
#################################################################################


def check_linear(m, n, k, route, device="cpu"):
    """Rows of 1e-4 and of 1e+3 in one matrix, a token and a channel of 1e+4: every output channel and every token by itself within float32's
    reach; and GELU's terms, whose scale is the layer's own."""
    x, weight, bias = (
        draw(m, k, seed=m, device=device),
        draw(n, k, seed=n, device=device),
        draw(n, seed=k, device=device),
    )
    x[0] *= 1e4
    x[:, 1] *= 1e4
    weight[: n // 2] *= 1e-4
    weight[n // 2 :] *= 1e3
    want = x.double() @ weight.double().t() + bias.double()
    layer = SplitLinear(weight, bias, balance(weight, bias), "layer", route)
    # Of one large product among small ones: two terms' rounding, low·low, and what the tensor core cuts off while it is in the accumulator.
    tolerance = {"torch": 8e-7, "cublas": 5e-6}.get(route, 2e-6)  # float32 itself: 1.2e-6
    got = layer(split(x))
    assert got.dtype == torch.float32 and got.shape == (m, n)
    # Against Σ|x·w|, float32's own yardstick: a sum that cancels has no relative accuracy in any arithmetic.
    reach = x.double().abs() @ weight.double().abs().t() + bias.double().abs()
    assert ((got.double() - want).abs() <= tolerance * reach).all()

    x = draw(m, k, seed=m, device=device)
    want = x.double() @ weight.double().t() + bias.double()
    overflow = torch.zeros(1, dtype=torch.int32, device=device)
    terms = layer(split(x), "gelu", overflow)
    assert terms.scale is None and terms.pair.shape == (2, m, n) and int(overflow) == 0
    shaped = F.gelu(want, approximate="tanh") * layer.after.double()
    assert error(terms.value(torch.float64), shaped) < 2e-6  # float32's tanh loses as much
    plain = SplitLinear(weight * layer.after[:, None], bias * layer.after, route=route)
    assert (
        error(plain(split(x), "terms", overflow).value(torch.float64), want * layer.after.double()) < 1e-6
        and int(overflow) == 0
    )
    # Without scales, as GELU and attention give them.
    bare = split(x, per_row=False)
    assert (
        (layer(bare).double() - want).abs()
        <= tolerance * (x.double().abs() @ weight.double().abs().t() + bias.double().abs())
    ).all()


def check_overflow(route, device="cpu"):
    """A result beyond 65504 is reported, be it one in a thousand."""
    weight, bias = draw(64, 64, seed=1, device=device), torch.zeros(64, device=device)
    layer = SplitLinear(weight, bias, torch.ones(64, device=device), "layer", route)
    x = draw(40, 64, seed=2, device=device)
    for row, expected in ((None, 0), (39, 1)):
        if row is not None:
            x[row] *= 1e5
        for result in ("terms", "gelu"):
            overflow = torch.zeros(1, dtype=torch.int32, device=device)
            terms = layer(split(x), result, overflow)
            assert int(overflow) == expected and bool(terms.pair.isfinite().all()) == (not expected)


@pytest.mark.parametrize("m, n, k", SHAPES)
def test_the_twin(m, n, k):
    check_linear(m, n, k, "torch")


def test_overflow_is_reported():
    check_overflow("torch")


def test_weights_that_are_not_finite_are_refused_by_name():
    weight = draw(8, 8)
    weight[3, 4] = float("inf")
    with pytest.raises(ValueError, match="blocks.7.mlp.fc1: holds weights that are not finite"):
        SplitLinear(weight, draw(8), name="blocks.7.mlp.fc1")
    with pytest.raises(ValueError, match="route 'cutlass'"):
        SplitLinear(draw(8, 8), draw(8), route="cutlass")


@pytest.mark.parametrize(
    "capability, dim, linear, attention",
    (
        ((7, 0), 72, "cublas", "cublas"),
        ((7, 5), 72, "cublas", "cublas"),
        ((8, 0), 72, "triton", "triton"),
        ((9, 0), 72, "hopper", "hopper"),
        ((9, 0), 64, "hopper", "triton"),
        ((10, 0), 72, "triton", "triton"),
    ),
)
def test_auto_by_capability(capability, dim, linear, attention, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert module.choose.__wrapped__(torch.device("cuda")) == linear
    assert attention_module.choose.__wrapped__(torch.device("cuda"), dim) == attention


#################################################################################
#                                   Attention                                   #
#################################################################################


def check_attention(n, tokens, heads, dim, route, device="cpu"):
    """Flat weights, sharp ones, and a few keys far above the rest."""
    for sharpness in (1, 30):
        qkv = draw(n, tokens, 3 * heads * dim, seed=tokens, device=device)
        qkv[..., : 2 * heads * dim] *= sharpness**0.5
        qkv[:, ::7, heads * dim : 2 * heads * dim] *= 3
        terms = split(qkv, per_row=False)
        want, plain = (naive(qkv.to(dtype), heads) for dtype in (torch.float64, torch.float32))
        got = split_attention(terms, heads, route)
        assert got.scale is None and got.pair.shape == (2, n, tokens, heads * dim)
        assert error(got.value(torch.float64), want) <= max(5 * error(plain, want), 1e-6)


def naive(qkv, heads):
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # each (n, H, T, d)
    return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("shape", HEADS)
def test_attentions_twin(shape):
    check_attention(*shape, "torch")


#################################################################################
#                       Triton's kernels without a GPU                          #
#################################################################################


def check_row_kernel(route, device="cpu"):
    """Residual, norm, modulation, and the split with a scale a row, also where rows differ by 1e+8 in size."""
    for width in (1152, 216, 100):
        x, table = draw(3, 20, width, seed=width, device=device), draw(4, 6, width, seed=1, device=device)
        table[2] *= 1e-4
        table[0, 3:5] *= 1e4
        modulation = Modulation(table, torch.tensor([2, 0, 1], device=device))
        branch = draw(3, 20, width, seed=2, device=device)
        want = norm_modulate(
            x.double(), Modulation(table.double(), modulation.entry), 3, 4, ((branch.double(), 2),), route="torch"
        )
        got = norm_modulate(x.clone(), modulation, 3, 4, ((branch, 2),), dtype="terms", route=route)
        assert got.scale.shape == (3, 20) and got.pair[0].abs().amax(-1).ge(2**14).all()
        assert ((got.value(torch.float64) - want).norm(dim=-1) <= 1e-6 * want.norm(dim=-1)).all()


def interpret():
    check_row_kernel("triton")
    for shape in SHAPES:
        check_linear(*shape, "triton")
    check_overflow("triton")
    for shape in HEADS:
        check_attention(*shape, "triton")
    print("interpreted")


def test_the_row_kernels_twin():
    check_row_kernel("torch")


def test_interpreted_kernels():
    """In a process of its own: the interpreter must be chosen before Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-c", "import test_split_linear; test_split_linear.interpret()"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0 and "interpreted" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("capability", (80, 90))
def test_compiles_ahead_of_time(capability, tmp_path):
    """Float16 products on tensor cores, none in TF32, for A100 and H100."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ahead_of_time_split.py")), str(capability)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all(int(products) > 0 and not int(tf32) for products, tf32 in map(str.split, lines)), (
        done.stdout
    )


#################################################################################
#                        Hopper's kernels without a GPU                         #
#################################################################################


def assembly(text, name, tmp_path):
    (tmp_path / "cubin").write_bytes(hopper.compile_cubin(text, name))
    return disassemble(tmp_path / "cubin")


@pytest.mark.parametrize("result", (0, 2))
def test_machine_code_of_the_product(result, tmp_path):
    """Three warpgroup products for every 16 of the inner dimension, awaited once a part, and no register spilled."""
    tile = split_hopper.TILE
    code = assembly(split_hopper.linear_source(tile, result), "split_linear.cu", tmp_path)
    shapes = re.findall(r"HGMMA\.(64x\d+x16)\.F32", code)
    assert shapes == [f"64x{tile.columns}x16"] * (3 * tile.depth // 16 * tile.promote)
    assert "STL" not in code and "LDL" not in code and code.count("WARPGROUP.DEPBAR") <= tile.promote
    assert tile.shared_bytes <= 227 * 1024


def test_machine_code_of_attention(tmp_path):
    config = split_hopper.CONFIG
    code = assembly(split_hopper.attention_source(config), "split_attention.cu", tmp_path)
    shapes = re.findall(r"HGMMA\.(64x\d+x16)\.F32", code)
    assert {shape: shapes.count(shape) for shape in set(shapes)} == {
        f"64x{config.keys}x16": 2 * 15,
        "64x72x16": 2 * 3 * config.keys // 16,
    }
    assert "STL" not in code and "LDL" not in code and code.count("WARPGROUP.DEPBAR") <= 4, "products are serialised"
    computing, copying = hopper.registers(config.warpgroups).values()
    assert config.shared_bytes <= 227 * 1024 and 128 * (config.warpgroups * computing + copying) <= 65536


def test_rows_are_arranged_as_lanes_hold_them():
    weight = torch.arange(40.0)[:, None].expand(40, 8)
    got = split_hopper.arrange(weight)[:, 0]
    assert got.shape == (64,)
    for eight in range(4):
        for lane in range(4):
            for i in range(2):
                assert got[8 * eight + 2 * lane + i] == 8 * lane + 2 * eight + i
    assert got[40:].sum() + got[32:40].sum() == sum(range(32, 40))


#################################################################################
#                                     GPU                                       #
#################################################################################

gpu = pytest.mark.gpu


def routes():
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    return ("cublas",) + ("triton",) * (capability >= (8, 0)) + ("hopper",) * (capability == (9, 0))


@gpu
@pytest.mark.parametrize("route", ("cublas", "triton", "hopper"))
def test_products_on_a_gpu(route):
    if route not in routes():
        pytest.skip(f"this GPU has no route {route}")
    for shape in (*SHAPES, (4096, 1152, 1152), (2048, 3456, 1152), (1000, 1152, 4608), (129, 4608, 1152)):
        check_linear(*shape, route, "cuda")
    check_overflow(route, "cuda")


@gpu
@pytest.mark.parametrize("route", ("cublas", "triton", "hopper"))
def test_attention_on_a_gpu(route):
    if route not in routes():
        pytest.skip(f"this GPU has no route {route}")
    for shape in (*HEADS, (3, 17, 2, 72), (2, 256, 16, 72), (1, 1000, 5, 72), (2, 1024, 16, 72), (1, 4096, 3, 72)):
        if route != "hopper" or shape[-1] == 72:
            check_attention(*shape, route, "cuda")
    qkv = split(draw(2, 700, 3 * 4 * 72, device="cuda"), per_row=False)
    first = split_attention(qkv, 4, route).pair
    assert all(torch.equal(split_attention(qkv, 4, route).pair, first) for _ in range(3)), "the same bits every time"


@gpu
def test_row_kernel_on_a_gpu():
    check_row_kernel("triton", "cuda")
