"""The exact tier: float32's result from float16 tensor cores. On a CPU by its reference
implementations, on a GPU by every backend.
"""

from functools import partial

import pytest
import torch
from conftest import mistake
from networks import DEVICES, build, error, inputs, network_of, ready
from test_large_dit import build as build_large

from accel.runtime.graphs import GraphedFunction
from accel.runtime.precision import arithmetic, supports


def bound(own):
    """Return the largest error that the tier promises: five times float32's own, at least 1e-6."""
    return 5 * max(own, 1e-6)


def strain(model):
    """Weights of any scale, the same in float64: rows of 1e-6, 1 and 1e+6 in one matrix,
    and channels whose activations are 1e+4 beside 1.
    """
    for block in model.blocks:
        qkv = block.attn.qkv
        fc1 = block.mlp.fc1
        fc2 = block.mlp.fc2
        proj = block.attn.proj
        dim = qkv.weight.shape[1]
        qkv.weight.data[:5] *= 1e3 * dim**0.5  # q's rows, against k's
        qkv.weight.data[dim : dim + 5] *= 1e-4
        qkv.weight.data[2 * dim : 2 * dim + 5] *= 1e6  # v's, against proj's columns
        proj.weight.data[:, :5] *= 1e-6
        fc1.weight.data[7:12] *= 1e4
        fc2.weight.data[:, 7:12] *= 1e-4
        fc1.weight.data[20:30] *= 1e-6
        fc1.bias.data[20:30] *= 1e-6
        fc2.weight.data[:, 20:30] *= 1e6
    return model


def uneven(model):
    """Queries 2¹⁴ times as large and keys 2¹⁴ times as small: the same function, and no
    sharper softmax.
    """
    for block in model.blocks:
        for part in (block.attn.qkv.weight.data, block.attn.qkv.bias.data):
            q, k, _ = part.chunk(3)
            q *= 2.0**14
            k *= 2.0**-14
    return model


@DEVICES
@pytest.mark.parametrize("change", (strain, uneven))
def test_weights_of_any_scale(device, change):
    """Within five times float32's own error, which may be large where the softmax is sharp."""
    model = change(build("DiT-Demo/2")).to(device)
    x, t, y = inputs(model, 4, device)
    exact = network_of(model, "exact")
    with torch.no_grad():
        own = model(x, t, y)
        want = model.double()(x.double(), t, y).cpu()
    assert (
        error(exact.forward(x, t, y), want) <= bound(error(own, want))
        and exact.overflowed() is None
    )


def too_large(model):
    """The second block's MLP sees tokens of 1e+6, fifty times what its high/low split has
    room for.
    """
    model.blocks[1].adaLN_modulation[1].bias.data[
        3 * model.pos_embed.shape[-1] : 4 * model.pos_embed.shape[-1]
    ] = 1e6
    return model


@DEVICES
def test_overflow_names_the_layer(device):
    model = too_large(build("DiT-Demo/2")).to(device)
    exact = network_of(model, "exact")
    assert (
        not exact.forward(*inputs(model, 2, device)).isfinite().all()
    )  # cannot be mistaken for a picture
    assert exact.overflowed() == "blocks.1.mlp.fc1"


def test_overflow_of_large_dits_queries_names_the_layer():
    model = build_large(qk_norm=True)
    model.layers[1].attention.k_norm.bias.data += 1e9
    model.layers[1].attention.q_norm.bias.data += 1e9
    exact = network_of(model, "exact")
    assert not exact.forward(*inputs(model, 2)).isfinite().all()
    assert exact.overflowed() == "layers.1.attention.wq, wk, wv"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, arguments, n",
    (
        ("DiT-Demo/2", {}, 16),
        ("DiT-S/8", dict(input_size=32), 6),
        ("DiT-L/2", dict(input_size=16), 2),
        ("DiT-XL/2", dict(input_size=32), 4),
    ),
)
def test_accuracy(name, arguments, n):
    """Every backend has at most five times float32's error and a twentieth of TF32's. A graph's
    replay has the same bits.
    """
    model = build(name, **arguments).cuda()
    x, t, y = inputs(model, n, "cuda")
    with torch.no_grad():
        with arithmetic("fp32"):
            own = model(x, t, y)
        tf32 = None
        if supports("tf32", x.device):
            with arithmetic("tf32"):
                tf32 = model(x, t, y)
        want = model.double()(x.double(), t, y).cpu()
    model.float()
    for gemm in ("cublas", "auto"):
        exact = network_of(model, "exact", gemm=gemm)
        exact.attention = partial(exact.attention, backend=gemm)
        captured = GraphedFunction(exact.forward)
        with arithmetic("exact"):
            got = [exact.forward(x, t, y), captured(x, t, y)]
        assert torch.equal(got[0], got[1]), gemm
        assert error(got[0], want) <= bound(error(own, want)), (
            gemm,
            error(got[0], want),
            error(own, want),
        )
        assert tf32 is None or 20 * error(got[0], want) <= error(tf32, want)


@pytest.mark.gpu
def test_overflow_is_a_line_before_a_run(tmp_path):
    torch.save(too_large(build("DiT-Demo/2")).state_dict(), tmp_path / "large.pt")
    with mistake("precision", "exact", "blocks.1.mlp.fc1", "fp32"):
        ready(
            model="DiT-Demo/2",
            ckpt=str(tmp_path / "large.pt"),
            output_type="latent",
            precision="exact",
        )


@pytest.mark.gpu
def test_fp32_fused():
    """At most fp32's error, give or take its rounding; the same bits by a graph's replay; no
    attention on tensor cores on Hopper.
    """
    model = build("DiT-XL/2", input_size=32).cuda()
    x, t, y = inputs(model, 16, "cuda")
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    with arithmetic("fp32-fused"), torch.no_grad():
        own = model(x, t, y)
        fused = network_of(model, "fp32-fused")
        captured = GraphedFunction(fused.forward)
        got = [fused.forward(x, t, y), captured(x, t, y)]
        with profiler as profile:
            fused.forward(x, t, y)
            torch.cuda.synchronize()
        want = model.double()(x.double(), t, y).cpu()
    assert torch.equal(got[0], got[1])
    assert error(got[0], want) <= 1.5 * max(error(own, want), 1e-6)
    names = {event.key for event in profile.key_averages()}
    if torch.cuda.get_device_capability() == (9, 0):
        assert "attention" in names and not [name for name in names if "fmha" in name], names
