"""Accelerated networks against their definitions in float64: on a CPU by the kernels'
reference implementations, on a GPU by the kernels.
"""

import pytest
import torch
from networks import build, error, evaluate, fast_network, guided, inputs, network_of, pack_of
from reference_networks import dit, large_dit
from test_large_dit import FORMS
from test_large_dit import build as build_large

from accel import accelerate
from accel.families.large_dit.network import DiT_Llama
from accel.fast import load
from accel.sampling.guidance import Guidance
from accel.tensors.shapes import shapes_only


def definition(model, x, t, y):
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    if isinstance(model, DiT_Llama):
        return large_dit(state, x, t, y, model.n_heads, model.patch_size)
    return dit(state, x, t, y, model.num_heads, model.patch_size)


DITS = (
    ("DiT-Demo/2", {}),
    ("DiT-S/4", dict(input_size=8, depth=3)),
    ("DiT-S/8", dict(input_size=32, depth=3)),
    ("DiT-S/2", dict(input_size=6, depth=3, learn_sigma=False, num_classes=5)),
)
MODELS = [lambda case=case: build(case[0], **case[1]) for case in DITS]
MODELS += [lambda form=form: build_large(**form) for form in FORMS]


@pytest.mark.parametrize("make", MODELS, ids=[*map(str, DITS), *map(str, FORMS)])
def test_float64_is_the_definition(make):
    model = make()
    fast = fast_network(model, torch.float64)
    x, t, y = inputs(model, 6)
    # the sinusoid of other times is float32 by contract
    for times, bound in ((t, 1e-5), (torch.zeros_like(t), 1e-10)):
        assert error(fast.forward(x.double(), times, y), definition(model, x, times, y)) < bound
    want = guided(definition(model, torch.cat([x[:3], x[:3]]), t, y), 3.5)[:3]
    assert error(evaluate(fast, x.double(), t, y, 3.5), want) < 1e-5


def test_every_weight_is_copied():
    """This includes the norms of queries and keys, which belong to no GEMM."""
    models = [build_large(**FORMS[0], qk_norm=True) for _ in range(2)]
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


@pytest.mark.parametrize("precision, tolerance", (("fp32", 5e-6), ("fp16", 1.5e-3), ("bf16", 1e-2)))
@pytest.mark.parametrize(
    "make",
    (MODELS[0], build_large, lambda: build_large(qk_norm=True)),
    ids=("DiT", "Large-DiT", "Large-DiT, qk-norm"),
)
def test_tiers_on_the_cpu(precision, tolerance, make):
    model = make()
    fast = network_of(model, precision)
    (x, t, y) = inputs(model, 6)
    got = fast.forward(x, t, y)
    assert got.dtype == torch.float32 and error(got, definition(model, x, t, y)) < tolerance
    t[3:] = t[:3]
    want = Guidance(3.5, 0).combine(definition(model, torch.cat([x[:3], x[:3]]), t, y), 3.5)
    assert error(evaluate(fast, x, t, y, 3.5), want) < 4 * tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("precision, tolerance", (("fp16", 1.5e-3), ("bf16", 1e-2)))
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
    # the first call captures, the second replays
    assert torch.equal(got[0], got[1]) and len(fast._forward.graphs) == 1


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
    "precision, tolerance", (("fp32", 1e-5), ("exact", 5e-6), ("fp16", 2e-3), ("bf16", 2e-2))
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
