"""The accelerated Large-DiT against its definition in float64: by the kernels' references on a CPU, by the kernels on a
GPU."""

import pytest
import torch
from networks import evaluate, fast_network, network_of, sample
from reference_networks import large_dit, relative_error
from test_large_dit import FORMS, batch, build

from accel.diffusion import create_diffusion
from accel.families.large_dit.network import DiT_Llama
from accel.fast import load
from accel.network import Plain
from accel.sampling.ancestral import Ancestral, Ddim
from accel.sampling.guidance import Guidance
from accel.weights.shapes import shapes_only


def definition(model, x, t, y):
    return large_dit({name: value.cpu() for name, value in model.state_dict().items()}, x, t, y, model.n_heads)


@pytest.mark.parametrize("form", FORMS)
def test_float64_is_the_definition(form):
    model = build(**form)
    fast = fast_network(model, torch.float64)
    x, _, y = batch(model)
    t = torch.zeros(4, dtype=torch.int64)  # of others the sinusoid is float32
    want = large_dit(model.state_dict(), x, t, y, model.n_heads, model.patch_size)
    assert relative_error(fast.forward(x.double(), t, y), want) < 1e-10


@pytest.mark.parametrize("precision, tolerance", (("fp32", 5e-6), ("fp16", 1e-3), ("bf16", 6e-3)))
@pytest.mark.parametrize("qk_norm", (False, True))
def test_tiers_on_the_cpu(precision, tolerance, qk_norm):
    model = build(qk_norm=qk_norm)
    fast = network_of(model, precision)
    x, t, y = batch(model, 6)
    got = fast.forward(x, t, y)
    assert got.dtype == torch.float32 and relative_error(got, definition(model, x, t, y)) < tolerance
    t[3:] = t[:3]
    want = Guidance(3.5, 0).combine(definition(model, torch.cat([x[:3], x[:3]]), t, y))
    assert relative_error(evaluate(fast, x, t, y, 3.5), want) < 4 * tolerance


def test_half_tiers_hold_half_weights():
    """No projection of a block or of the conditioning is kept in float32."""
    fast = network_of(build(qk_norm=True), "fp16")
    held = [tensor for block in fast.blocks for layer in block.gemms for tensor in layer.parameters()]
    assert all(tensor.dtype == torch.float16 for tensor in [*held, fast.conditioning.weight])


@pytest.mark.parametrize("process", (Ancestral(create_diffusion("5")), Ddim(create_diffusion("5"))))
def test_the_loop_gives_the_plain_networks_latents(process):
    model = build(qk_norm=True)
    z, labels = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 7])
    latents = []
    for network in (Plain(model), network_of(model, "fp32")):
        torch.manual_seed(0)
        latents.append(sample(network, process, z, labels, 2.0, 10))
    assert relative_error(latents[1], latents[0].double()) < 1e-4


def test_part_of_the_tokens():
    model = build(qk_norm=True)
    fast = fast_network(model, torch.float64)
    x, t, y = batch(model, 2)
    x, part = x.double(), slice(4, 12)
    condition, seen = fast.condition(t, y), []

    def attend(qkv, num_heads):
        seen.append(qkv.clone())
        return fast.attention(qkv, num_heads)

    fast.forward_blocks(fast.embed(x), condition, attend)
    whole, seen = seen[0], []
    fast.forward_blocks(fast.embed(x, part), condition, attend, part)
    torch.testing.assert_close(seen[0], whole[:, part])  # rotated by where the tokens stand in the row


def strain(model):
    """Weights of any scale, the same function: neighbouring channels of q against those of k, v's against wo's columns,
    outliers of SwiGLU's."""
    for layer in model.layers:
        mixed, mlp = layer.attention, layer.feed_forward
        normed = isinstance(mixed.q_norm, torch.nn.LayerNorm)
        queries, keys = (mixed.q_norm, mixed.k_norm) if normed else (mixed.wq, mixed.wk)
        for module, factor in ((queries, 1e3), (keys, 1e-3)):
            for value in module.parameters():
                value.data[:6] *= factor
        mixed.wv.weight.data[:5] *= 1e6
        mixed.wo.weight.data[:, :5] *= 1e-6
        mlp.w3.weight.data[7:12] *= 1e4
        mlp.w2.weight.data[:, 7:12] *= 1e-4
    return model


@pytest.mark.parametrize("qk_norm", (True, False))
@pytest.mark.parametrize("change", (lambda model: model, strain))
def test_exact_errs_no_more_than_float32(qk_norm, change):
    model = change(build(qk_norm=qk_norm))
    x, _, y = batch(model, 6)
    t = torch.zeros(6, dtype=torch.int64)  # of others the sinusoid is float32
    want, exact = definition(model, x, t, y), network_of(model, "exact")
    with torch.no_grad():
        assert relative_error(exact.forward(x, t, y), want) <= relative_error(model(x, t, y), want)
    assert exact.overflowed() is None


def test_exact_names_the_layer_that_overflows():
    model = build(qk_norm=True)
    model.layers[1].attention.k_norm.bias.data += 1e9
    model.layers[1].attention.q_norm.bias.data += 1e9
    exact = network_of(model, "exact")
    assert not exact.forward(*batch(model, 2)).isfinite().all()
    assert exact.overflowed() == "layers.1.attention.wq, wk, wv"


#################################################################################
#                                     GPU                                       #
#################################################################################

# Head dims 96, 128 and 48, as 3B, 7B and 600M have them, and widths that need more than one tile.
WIDE = (
    dict(dim=768, n_heads=8, n_layers=3, input_size=32),
    dict(dim=1024, n_heads=8, n_layers=3, input_size=32),
    dict(dim=384, n_heads=8, n_layers=3, input_size=16),
    dict(dim=3072, n_heads=32, n_layers=1, input_size=32),
)


@pytest.mark.gpu
@pytest.mark.parametrize("form", WIDE)
@pytest.mark.parametrize("precision, tolerance", (("fp32", 1e-5), ("exact", 5e-6), ("fp16", 2e-3), ("bf16", 2e-2)))
def test_tiers_on_a_gpu(form, precision, tolerance):
    model = build(**form, qk_norm=True)
    if precision == "bf16" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("a V100 has no bfloat16")
    x, t, y = batch(model)
    want = definition(model, x, t, y)
    fast = network_of(model, precision, "cuda")
    got = fast.forward(x.cuda(), t.cuda(), y.cuda())
    assert got.isfinite().all() and relative_error(got.cpu(), want) < tolerance


@pytest.mark.gpu
def test_captured_steps_are_the_eager_ones():
    model = build(**WIDE[0], qk_norm=True)
    z, labels = torch.randn(2, 4, 32, 32, device="cuda"), torch.tensor([1, 7], device="cuda")
    diffusion = create_diffusion("4")
    for process in (Ancestral(diffusion), Ddim(diffusion), Ddim(diffusion, 0.5)):
        latents = []
        for captures in (True, False):
            network = fast_network(model, torch.float16, "cuda")
            network.captures = captures
            torch.manual_seed(0)
            latents.append(sample(network, process, z, labels, 4.0, 10))
        assert latents[0].isfinite().all() and torch.equal(*latents)


@pytest.mark.gpu
def test_loading_holds_no_float32_copy_on_the_gpu():
    """Of the blocks' and the conditioning's weights: the peak is two bytes a weight, and a few tensors."""
    model = build(**{**WIDE[1], "n_layers": 12}, qk_norm=True)
    with shapes_only():
        empty = DiT_Llama(**{**WIDE[1], "n_layers": 12, "num_classes": 10, "qk_norm": True})
    weights = sum(value.numel() for value in model.parameters())
    largest = max(value.numel() for value in model.parameters())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    network = load(model.state_dict(), empty, "fp16", torch.device("cuda"), 2)
    peak = torch.cuda.max_memory_allocated() - before
    block = 2 * 2 * weights / 12  # zeros of one block, and its copy, while kernels compile
    assert peak <= 2 * weights + block + 16 * largest + (64 << 20), f"{peak / weights:.2f} bytes a weight"
    x, t, y = batch(model, 2)
    got = network.forward(x.cuda(), t.cuda(), y.cuda())
    assert relative_error(got.cpu(), definition(model, x, t, y)) < 2e-3
