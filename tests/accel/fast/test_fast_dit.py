"""The accelerated network against the one written from the paper in float64: on a CPU by its reference implementations,
on a GPU by its kernels."""

from functools import partial

import pytest
import torch
from networks import build, error, evaluate, fast_network, guided, inputs, network_of
from reference_networks import dit

from accel import accelerate


@pytest.mark.parametrize(
    "name, arguments",
    (
        ("DiT-Demo/2", {}),
        ("DiT-S/4", dict(input_size=8)),
        ("DiT-S/8", dict(input_size=32)),
        ("DiT-S/2", dict(input_size=6, learn_sigma=False, num_classes=5)),
    ),
)
def test_float64_is_the_network_of_the_paper(name, arguments):
    model = build(name, **arguments)
    fast = fast_network(model, torch.float64)
    x, t, y = inputs(model, 5)
    want = dit(model.state_dict(), x, t, y, model.num_heads, model.patch_size)
    # The sinusoid is float32 by contract, the reference's is float64.
    assert error(fast.forward(x.double(), t, y), want) < 1e-5
    x, t, y = inputs(model, 6)
    want = dit(model.state_dict(), torch.cat([x[:3], x[:3]]), t, y, model.num_heads, model.patch_size)
    assert error(evaluate(fast, x.double(), t, y, 3.5), guided(want, 3.5)[:3]) < 1e-5


@pytest.mark.parametrize("precision, tolerance", (("fp32", 1e-6), ("fp16", 1.5e-3), ("bf16", 1e-2)))
def test_precisions_on_the_cpu(precision, tolerance):
    model = build("DiT-Demo/2")
    fast = network_of(model, precision)
    x, t, y = inputs(model, 4)
    with torch.no_grad():
        want = model.double()(x.double(), t, y)
    got = fast.forward(x, t, y)
    assert got.dtype == torch.float32 and error(got, want) < tolerance


def test_the_model_is_read_not_changed():
    model = build("DiT-S/4", input_size=8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fast = network_of(model, "fp16")
    x, t, y = inputs(model, 2)
    first = fast.forward(x, t, y)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for value in model.parameters():
        value.data.add_(1)  # and what is read is a copy, in half and in float32
    assert torch.equal(fast.forward(x, t, y), first)


#################################################################################
#                                   On a GPU                                    #
#################################################################################

gpu = pytest.mark.gpu


@gpu
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
    assert torch.equal(got[0], got[1]) and len(fast._forward.graphs) == 1  # the first call captures, the second replays


@gpu
@pytest.mark.parametrize("n", (1, 2, 3, 8, 64))
def test_every_switch_computes_the_same(n):
    model = build("DiT-Demo/2").cuda()
    x, t, y = inputs(model, 2 * n, "cuda")
    with torch.no_grad():
        want = model.double().forward_with_cfg(x.double(), t, y, 4.0).cpu()
    model.float()
    plain = dict(adaln="torch", attention="efficient", patch_embed="torch")
    changes = {}, dict(adaln="triton"), dict(attention="auto"), dict(patch_embed="triton")
    for gemm, change in [("torch", change) for change in changes] + [("epilogue", {}), ("tuned", {})]:
        fast = network_of(model, "fp16", gemm=gemm)
        for op, backend in (plain | change).items():
            setattr(fast, op, partial(getattr(fast, op), backend=backend))
        # Guidance of 4 multiplies a forward's error.
        assert error(evaluate(fast, x, t, y, 4.0), want[:n]) < 3e-3, (gemm, change)
