"""Accelerated networks against their definitions in float64: on a CPU by the kernels'
reference implementations, on a GPU by the kernels.
"""

from functools import partial

import pytest
import test_jit
import test_large_dit
import test_lightning_dit
import test_models
import test_rae
import torch
from networks import (
    DEVICES,
    build,
    error,
    evaluate,
    fast_network,
    guided,
    inputs,
    network_of,
    pack_of,
    small,
)
from reference_networks import dit, jit, large_dit, lightning_dit
from test_large_dit import build as build_large

from accel import accelerate
from accel.families.jit.network import JiT
from accel.families.large_dit.network import DiT_Llama
from accel.families.lightning_dit.network import LightningDiT
from accel.families.rae.network import DiTwDDTHead
from accel.families.sit.network import SiT
from accel.fast import load, warmup_calls
from accel.tensors.shapes import shapes_only


def definition(model, x, t, y):
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    if isinstance(model, DiT_Llama):
        return large_dit(state, x, t, y, model.n_heads, model.patch_size)
    if isinstance(model, JiT):
        return jit(state, x, t, y, test_jit.START)
    if isinstance(model, DiTwDDTHead):
        return test_rae.velocity(model, x, t, y)
    if isinstance(model, LightningDiT):
        return lightning_dit(test_lightning_dit.as_file(model.cpu()), x, t, y)
    out = dit(state, x, t, y, model.num_heads, model.patch_size)
    return out[:, : model.in_channels] if isinstance(model, SiT) else out


def given(model):
    """Return latents, times and labels of four batch rows; the second half has the null label."""
    if isinstance(model, JiT):
        return test_jit.inputs()
    if isinstance(model, DiTwDDTHead):
        return test_rae.inputs()
    x, t, y = inputs(model, 4)
    return x, t / 1000 if isinstance(model, (LightningDiT, SiT)) else t, y


def off(got, want):
    """Return the relative error of the channels that `want` has: a SiT's sigma is not sampled."""
    return error(got[:, : want.shape[1]], want)


FORMS = {
    **{f"DiT {form}": partial(small, **form) for form in test_models.FORMS},
    **{f"SiT {form}": partial(small, SiT, **form) for form in test_models.FORMS},
    **{f"Large-DiT {form}": partial(build_large, **form) for form in test_large_dit.FORMS},
    **{
        f"LightningDiT {form}": partial(test_lightning_dit.build, **form)
        for form in test_lightning_dit.FORMS
    },
    "JiT": test_jit.build,
    "RAE": test_rae.build,
    "RAE, qk-norm": partial(test_rae.build, use_qknorm=True),
}


@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_networks_compute_the_definition(name):
    """The reference network in float32, the accelerated one in float64."""
    model = FORMS[name]()
    fast = fast_network(model, torch.float64)
    x, t, y = given(model)
    want = definition(model, x, t, y)
    assert want.std() > 0.1
    assert error(model(x, t, y), want) < 6e-6
    # the sinusoid of other times is float32 by contract
    zero = torch.zeros_like(t)
    for times, bound in ((t, 1e-5), (zero, 1e-6)):
        assert off(fast.forward(x.double(), times, y), definition(model, x, times, y)) < bound
    assert error(definition(model, x, zero, y), want) > 1e-2
    t[2:] = t[:2]
    want = guided(definition(model, torch.cat([x[:2], x[:2]]), t, y), 3.5)[:2]
    assert off(evaluate(fast, x.double(), t, y, 3.5), want) < 1e-5


ONE_OF_EACH = ["DiT {}", "SiT {}", "Large-DiT {}", "LightningDiT {}", "JiT", "RAE", "RAE, qk-norm"]


@DEVICES
@pytest.mark.parametrize(
    "tier, tolerance", (("fp32-fused", 5e-6), ("exact", 5e-6), ("fp16", 2e-3), ("bf16", 2e-2))
)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_tiers(name, tier, tolerance, device):
    """Evaluations of any times, and those of a run."""
    model = FORMS[name]()
    want = definition(model, *given(model))
    network = network_of(model, tier, device)
    x, t, y = (value.to(device) for value in given(model))
    got = network.forward(x, t, y)
    assert got.dtype == torch.float32 and off(got, want) < tolerance
    for call in warmup_calls(network, 4):
        call()
    run = network.prepare(t.tolist(), y.tolist())
    run.advance(*range(4))
    got = network.forward(x, torch.arange(4, device=device), y, run)
    assert off(got, want) < tolerance and network.overflowed() is None


def test_every_weight_is_copied():
    """This includes the norms of queries and keys, which belong to no GEMM."""
    models = [build_large(qk_norm=True) for _ in range(2)]
    for value in models[1].parameters():
        value.data.mul_(1.5)
    x, t, y = inputs(models[0], 2)
    ours, other = (fast_network(model, torch.float32) for model in models)
    want = [network.forward(x, t, y) for network in (other, ours)]
    ours.copy_weights(other)
    assert torch.equal(ours.forward(x, t, y), want[0]) and torch.equal(
        other.forward(x, t, y), want[0]
    )
    assert not torch.equal(*want)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "precision, tolerance", (("fp16", 1.5e-3), ("bf16", 1e-2), ("fp32-fused", 5e-6))
)
@pytest.mark.parametrize(
    "name, arguments, n",
    (
        ("DiT-Demo/2", {}, 16),
        ("DiT-S/8", dict(input_size=32), 7),
        ("DiT-B/4", dict(input_size=32), 1),
        ("DiT-L/2", dict(input_size=16), 2),
        ("DiT-XL/2", dict(input_size=32), 4),
    ),
)
def test_half_precision(name, arguments, n, precision, tolerance):
    model = build(name, **arguments).cuda()
    x, t, y = inputs(model, n, "cuda")
    fast = accelerate(model, precision)
    got = [fast.forward(x, t, y) for _ in range(2)]
    with torch.no_grad():
        want = model.double()(x.double(), t, y).cpu()
    assert error(got[0], want) < tolerance
    assert torch.equal(got[0], got[1])  # the first call captures, the second replays


# Head dims 96, 128 and 48, as 3B, 7B and 600M have them, and widths that need more than
# one tile.
WIDE = (
    dict(dim=768, n_heads=8, n_layers=3, input_size=32),
    dict(dim=1024, n_heads=8, n_layers=3, input_size=32),
    dict(dim=384, n_heads=8, n_layers=3, input_size=16),
    dict(dim=3072, n_heads=32, n_layers=1, input_size=32),
)


@pytest.mark.gpu
@pytest.mark.parametrize("form", WIDE)
@pytest.mark.parametrize(
    "precision, tolerance", (("fp32-fused", 1e-5), ("exact", 5e-6), ("fp16", 2e-3), ("bf16", 2e-2))
)
def test_tiers_of_large_dit(form, precision, tolerance):
    model = build_large(**form, qk_norm=True)
    if precision == "bf16" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("a V100 has no bfloat16")
    x, t, y = inputs(model, 4)
    got = network_of(model, precision, "cuda").forward(x.cuda(), t.cuda(), y.cuda())
    assert got.isfinite().all() and error(got, definition(model, x, t, y)) < tolerance


@pytest.mark.gpu
def test_loading_holds_no_float32_copy_on_the_gpu():
    """The peak is at most two bytes per weight plus a few tensors."""
    form = dict(WIDE[1], n_layers=12, num_classes=10, qk_norm=True)
    model = build_large(**form)
    with shapes_only():
        empty = DiT_Llama(**form)
    weights = sum(value.numel() for value in model.parameters())
    largest = max(value.numel() for value in model.parameters())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    network = load(model.state_dict(), empty, pack_of(model), "fp16", torch.device("cuda"), 2)
    peak = torch.cuda.max_memory_allocated() - before
    block = 2 * 2 * weights / 12  # zeros of one block, and its copy, while kernels compile
    assert peak <= 2 * weights + block + 16 * largest + (64 << 20), (
        f"{peak / weights:.2f} bytes a weight"
    )
    x, t, y = inputs(model, 2)
    assert error(network.forward(x.cuda(), t.cuda(), y.cuda()), definition(model, x, t, y)) < 2e-3
