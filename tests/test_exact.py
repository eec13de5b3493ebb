"""The exact tier: float32's result from float16 tensor cores. On a CPU through its twins, on a GPU through every route."""

from dataclasses import replace

import pytest
import torch
from test_fast import build, error, guided, inputs

from accel import engine, precision
from accel.fast import FastDiT, Optimisations, accelerate
from accel.options import SamplingOptions, UsageError


def bar(own):
    """What the tier promises of a forward's error: five times float32's own, whose floor is 1e-6."""
    return 5 * max(own, 1e-6)


def test_accuracy_by_the_twins():
    for name, arguments in (("DiT-Demo/2", {}), ("DiT-S/4", dict(input_size=8))):
        model = build(name, **arguments)
        x, t, y = inputs(model, 4)
        exact = accelerate(model, "exact")
        with torch.no_grad():
            own = model.forward_with_cfg(x, t, y, 4.0)
            want = guided(model.double()(torch.cat([x[:2], x[:2]]).double(), t, y), 4.0)
        assert error(exact.forward_with_cfg(x, t, y, 4.0), want) <= bar(error(own, want)) and exact.overflowed() is None


def strain(model):
    """Weights of any scale, the same in float64: rows of 1e-6, 1 and 1e+6 in one matrix, and channels whose activations are 1e+4
    beside 1."""
    for block in model.blocks:
        qkv, fc1, fc2, proj = block.attn.qkv, block.mlp.fc1, block.mlp.fc2, block.attn.proj
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


def check_any_scale(device):
    """Each network within five times float32's own error; that one may be large here, for the softmax is sharp."""
    model = strain(build("DiT-Demo/2")).to(device)
    x, t, y = inputs(model, 4, device)
    exact = accelerate(model, "exact")
    with torch.no_grad():
        own = model(x, t, y)
        want = model.double()(x.double(), t, y).cpu()
    assert error(exact(x, t, y), want) <= bar(error(own, want)) and exact.overflowed() is None


def test_weights_of_any_scale_by_the_twins():
    check_any_scale("cpu")


def too_large(model):
    """The second block's MLP sees tokens of 1e+6, fifty times what its terms have room for."""
    model.blocks[1].adaLN_modulation[1].bias.data[3 * model.pos_embed.shape[-1] : 4 * model.pos_embed.shape[-1]] = 1e6
    return model


def check_overflow_names_the_layer(device):
    model = too_large(build("DiT-Demo/2")).to(device)
    exact = accelerate(model, "exact")
    assert not exact(*inputs(model, 2, device)).isfinite().all()  # never a picture
    assert exact.overflowed() == "blocks.1.mlp.fc1"


def test_overflow_names_the_layer_by_the_twins():
    check_overflow_names_the_layer("cpu")


def test_the_commands_know_the_tier(tmp_path):
    """Without tensor cores it is refused, with the compiler too, in one line."""
    options = SamplingOptions(
        model="DiT-Demo/2", precision="exact", device="cpu", output=str(tmp_path / "x.png")
    ).resolve()
    with pytest.raises(UsageError, match="--precision exact: cpu has no float16 tensor cores .*; choose fp32"):
        engine.Engine(options)
    with pytest.raises(UsageError, match="--compile: .* another --precision"):
        engine.Engine(replace(options, compile=True))


def test_no_tf32_but_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(precision, "supports", lambda tier, device: True)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        for tier, products, convolutions in (
            ("fp32", False, False),
            ("exact", False, False),
            ("tf32", True, True),
            ("fp16", False, True),
        ):
            precision.apply_precision(tier, torch.device("cuda"))
            assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (products, convolutions)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


#################################################################################
#                                   On a GPU                                    #
#################################################################################

gpu = pytest.mark.gpu


def routes():
    """(products, attention) that this GPU can run."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    return [("cublas", "cublas")] + [("triton", "triton")] * (capability >= (8, 0)) + [("auto", "auto")]


@gpu
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
    """By every route: at most five times float32's error, and a twentieth of TF32's; the same bits by a graph's replay."""
    model = build(name, **arguments).cuda()
    x, t, y = inputs(model, n, "cuda")
    with torch.no_grad():
        own = model(x, t, y)
        if precision.supports("tf32", x.device):
            precision.apply_precision("tf32", x.device)
            tf32 = model(x, t, y)
            precision.apply_precision("fp32", x.device)
        else:
            tf32 = None
        want = model.double()(x.double(), t, y).cpu()
    model.float()
    for products, attention in routes():
        exact = accelerate(model, "exact", optimisations=Optimisations(products=products, attention=attention))
        got = [exact(x, t, y).clone() for _ in range(2)]
        assert torch.equal(got[0], got[1]), products
        assert error(got[0], want) <= bar(error(own, want)), (products, error(got[0], want), error(own, want))
        assert tf32 is None or 20 * error(got[0], want) <= error(tf32, want)


@gpu
def test_strict_gate():
    """64 pictures of the demo after 250 steps: not one in a hundred pixels off by a level, in any picture."""
    from bench.steps import Judge

    found = Judge(1, torch.device("cuda")).judge("exact", Optimisations())
    assert found["pictures"] == 64 and found["strict"] and found["worst"]["psnr"] > 60, found


@gpu
def test_weights_of_any_scale():
    check_any_scale("cuda")


@gpu
def test_overflow_names_the_layer(tmp_path):
    check_overflow_names_the_layer("cuda")
    torch.save(too_large(build("DiT-Demo/2")).state_dict(), tmp_path / "large.pt")
    options = SamplingOptions(
        model="DiT-Demo/2",
        ckpt=str(tmp_path / "large.pt"),
        num_sampling_steps=5,
        output_type="latent",
        precision="exact",
        output=str(tmp_path / "x.npy"),
    ).resolve()
    with pytest.raises(UsageError, match="--precision exact: blocks.1.mlp.fc1 gives values .*; use --precision fp32"):
        engine.Engine(options)


def kernels(call):
    """Names of the kernels that a call launches."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.key for event in profile.key_averages()]


@gpu
def test_no_tf32_kernel_runs():
    """By the names of the kernels that ran; and our own did run."""
    precision.apply_precision("exact", torch.device("cuda"))
    model = build("DiT-XL/2", input_size=32).cuda()
    x, t, y = inputs(model, 4, "cuda")
    exact = FastDiT(model.state_dict(), model.num_heads, "terms", torch.device("cuda"), Optimisations(graph=False))
    names = kernels(lambda: exact(x, t, y))
    assert names and not [name for name in names if "tf32" in name.lower() or "s1688" in name], names
    if torch.cuda.get_device_capability() == (9, 0):
        assert {"split_linear", "split_attention"} <= set(names), names
        assert not [
            name
            for name in names
            if "hopper" not in name and ("attention" in name.lower() and name != "split_attention")
        ], names
