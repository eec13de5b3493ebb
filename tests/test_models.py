"""models.DiT: the paper's equations, the published keys and shapes, guidance, training."""

import copy
import io
from functools import partial

import numpy as np
import pytest
import torch
from conftest import fill
from networks import error, inputs
from reference_networks import dit, position_table
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.ao.quantization import quantize_dynamic
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import models
from accel import Sampler, accelerate
from accel.errors import UsageError
from accel.families.sit import network as sit
from models import DiT, DiT_models

SMALL = dict(input_size=8, hidden_size=144, depth=3, num_heads=2, num_classes=10)


FORMS = (
    {},
    {"patch_size": 4, "learn_sigma": False},
    {"patch_size": 1, "in_channels": 3, "mlp_ratio": 2.0},
)


def test_norms_have_upstreams_epsilon_and_no_weights():
    """Another epsilon hardly shows in outputs."""
    norms = [module for module in DiT(**SMALL).modules() if isinstance(module, nn.LayerNorm)]
    kinds = {(norm.eps, norm.elementwise_affine) for norm in norms}
    assert len(norms) == 7 and kinds == {(1e-6, False)}


@pytest.mark.parametrize("module, builders", [(models, DiT_models), (sit, sit.SiT_models)])
def test_constructors_have_upstreams_names(module, builders):
    for name, build in builders.items():
        assert getattr(module, name.replace("-", "_").replace("/", "_")) is build


def test_position_table_and_timestep_embedding():
    table = models.get_2d_sincos_pos_embed(16, 3)
    assert np.allclose(table, position_table(3, 16).numpy(), atol=1e-12)
    with_token = models.get_2d_sincos_pos_embed(16, 3, cls_token=True, extra_tokens=2)
    assert with_token.shape == (11, 16) and not with_token[:2].any()
    t = torch.tensor([0, 7, 999])
    with FakeTensorMode():  # a trace, as torch.export's, leaves the values to later callers
        models.TimestepEmbedder.timestep_embedding(torch.ones(3), 9)
    embedding = models.TimestepEmbedder.timestep_embedding(t, 9)
    angles = t[:, None] * 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    assert torch.allclose(
        embedding.double(), torch.cat([angles.cos(), angles.sin(), torch.zeros(3, 1)], 1), atol=1e-4
    )


# ---- Every way to run the network that torch offers, and to change its parts ----


def some(model, *given):
    """Return the first two batch rows of the inputs."""
    return tuple(value[:2] for value in given)


def exported(model, *given):
    rows = {0: torch.export.Dim("rows", min=2, max=64)}
    program = torch.export.export(model, some(model, *given), dynamic_shapes=(rows,) * 3)
    return program.module()(*given)


def pickled(model, *given):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)(*given)


def by_rows(model, *given):
    return torch.vmap(lambda *row: model(*(value[None] for value in row))[0])(*given)


def differentiated_forward(model, x, t, y):
    for block in model.blocks:
        block.attn.fused_attn = False  # torch has no such derivative of the fused kernel
    return torch.func.jvp(lambda x: model(x, t, y), (x,), (x,))[0]


def with_parameters(model, *given):
    return torch.func.functional_call(model, dict(model.named_parameters()), given)


def with_compiled_blocks(model, *given):
    for block in model.blocks:
        block.compile(backend="eager", fullgraph=True)
    return model(*given)


def in_bfloat16(model, x, t, y):
    return model.bfloat16()(x.bfloat16(), t, y)


def with_autocast(model, *given):
    with torch.autocast("cpu", torch.bfloat16):
        return model(*given)


RUNS = {
    "torch.compile": lambda model, *given: torch.compile(model, backend="eager", fullgraph=True)(
        *given
    ),
    "Module.compile": with_compiled_blocks,
    "torch.export": exported,
    "torch.jit.trace": lambda model, *given: torch.jit.trace(model, some(model, *given))(*given),
    "make_fx": lambda model, *given: make_fx(model)(*given)(*given),
    "DataParallel": lambda model, *given: torch.nn.DataParallel(model)(*given),
    "AveragedModel": lambda model, *given: AveragedModel(model)(*given),
    "checkpoint": lambda model, *given: checkpoint(model, *given, use_reentrant=False),
    "deepcopy": lambda model, *given: copy.deepcopy(model)(*given),
    "pickle": pickled,
    "vmap": by_rows,
    "jvp": differentiated_forward,
    "functional_call": with_parameters,
    "channels_last": lambda model, *given: model.to(memory_format=torch.channels_last)(*given),
}
HALF = {"bfloat16": in_bfloat16, "autocast": with_autocast}


@pytest.mark.filterwarnings("ignore")  # of traces
@pytest.mark.parametrize("name", [*RUNS, *HALF])
def test_ways_to_run(monkeypatch, name):
    model = fill(DiT(**SMALL))
    given = inputs(model, 4)
    want = dit(model.state_dict(), *given, heads=2, patch=2)
    # A run may be the first.
    fresh = models.cached_table(models._frequencies.__wrapped__)
    monkeypatch.setattr(models, "_frequencies", fresh)
    got = {**RUNS, **HALF}[name](model, *given)
    assert error(got, want) < (5e-2 if name in HALF else 4e-6)
    if name not in HALF:
        assert error(model(*given), want) < 4e-6  # the run leaves nothing behind


# ---- Parts that a caller replaces ----


class Opaque(nn.Module):
    """A module without the attributes of the part that it calls."""

    def __init__(self, part, factor):
        super().__init__()
        self.call = lambda *given: factor * part(*given)

    def forward(self, *given):
        return self.call(*given)


def enclose(model, name, factor=1.5):
    """Put an Opaque around a part of a model."""
    for block in model.blocks:
        block.attn.fused_attn = False  # attn_drop is a part of the explicit formula
    parent, _, last = name.rpartition(".")
    part = Opaque(model.get_submodule(name), factor)
    model.get_submodule(parent).register_module(last, part)


class Int8(nn.Module):
    """A linear layer whose weight is stored as integers."""

    def __init__(self, layer):
        super().__init__()
        self.step = layer.weight.detach().abs().amax() / 127
        integers = (layer.weight.detach() / self.step).round().to(torch.int8)
        self.weight = nn.Parameter(integers, requires_grad=False)
        self.bias = layer.bias

    def forward(self, x):
        return nn.functional.linear(x, self.step * self.weight, self.bias)


def in_int8(model):
    model.t_embedder.mlp[0] = Int8(model.t_embedder.mlp[0])
    model.blocks[0].attn.qkv = Int8(model.blocks[0].attn.qkv)


def unpacked_by_a_hook(model):
    def doubled(block, arguments):
        x, c = arguments
        return x, 2 * c

    def halved(attn, arguments):
        (x,) = arguments
        return (x / 2,)

    model.blocks[0].register_forward_pre_hook(doubled)
    model.blocks[1].attn.register_forward_pre_hook(halved)


def with_functions_in_place_of_blocks(model):
    first, *others = model.blocks
    del model.blocks
    model.blocks = [first, lambda x, c: x * c[:, None]]


def with_fewer_blocks(model):
    model.blocks = nn.ModuleList([*model.blocks][::2])


def with_normed_queries(model):
    model.blocks[0].attn.q_norm = nn.LayerNorm(72)
    model.blocks[0].attn.k_norm = nn.LayerNorm(72)


def with_masked_weights(model):
    attn = model.blocks[0].attn
    attn.fused_attn = False
    attn.scale = 0.3
    attn.attn_drop.register_forward_hook(lambda part, arguments, weights: weights.tril())


def with_dropout(model):
    model.train()
    for block in model.blocks:
        block.attn.fused_attn = False
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.3


def with_spectral_norm(model):
    """Parametrise, as training does: each access of a weight changes the norm's estimate."""
    for layer in (model.t_embedder.mlp[0], model.blocks[0].mlp.fc1):
        torch.manual_seed(0)
        spectral_norm(layer)
    model.train()


PARTS = [
    name for name, _ in DiT(**{**SMALL, "depth": 1}).named_modules() if name not in ("", "blocks")
]
CHANGES = {
    "block.forward": lambda model: setattr(model.blocks[0], "forward", lambda x, c: x + c[:, None]),
    "attn.forward": lambda model: setattr(model.blocks[1].attn, "forward", lambda x: x.flip(1)),
    "mlp.forward": lambda model: setattr(model.blocks[1].mlp, "forward", torch.sin),
    "pre-hooks": unpacked_by_a_hook,
    "functions": with_functions_in_place_of_blocks,
    "fewer blocks": with_fewer_blocks,
    "norms of q and k": with_normed_queries,
    "attention's weights": with_masked_weights,
    "dropout": with_dropout,
    "spectral_norm": with_spectral_norm,
    "prune": lambda model: prune.l1_unstructured(model.blocks[0].mlp.fc1, "weight", 0.5),
    "quantize_dynamic": lambda model: quantize_dynamic(model, {nn.Linear}, inplace=True),
    "int8": in_int8,
    **{f"own {name}": partial(enclose, name=name) for name in PARTS},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of quantize_dynamic
@pytest.mark.parametrize("name", CHANGES)
def test_changed_parts(name):
    """The output follows the change. A copy is refused, or equal."""
    model = fill(DiT(**SMALL))
    given = inputs(model, 4)
    before = model(*given).double()
    CHANGES[name](model)
    assert error(model(*given), before) > 1e-3
    try:
        copy = accelerate(model, "fp32")
    except UsageError:
        with pytest.raises(UsageError):
            Sampler(model, device="cpu", output_type="latent", num_sampling_steps=2)
    else:
        assert error(copy(*given), model.eval()(*given).double()) < 1e-4


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_another_class_gets_the_parts_inputs(name):
    model = fill(DiT(**SMALL))
    given = inputs(model, 4)
    want = dit(model.state_dict(), *given, heads=2, patch=2)
    enclose(model, name, factor=1)
    assert error(model(*given), want) < 4e-6
