"""models.DiT: the paper's equations, the published keys and shapes, guidance, training."""

import numpy as np
import pytest
import torch
from conftest import fill
from networks import error, inputs
from reference_networks import dit, position_table
from torch._subclasses.fake_tensor import FakeTensorMode

import models
from models import DiT, DiT_models

SMALL = dict(input_size=8, hidden_size=144, depth=3, num_heads=2, num_classes=10)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"patch_size": 4, "learn_sigma": False},
        {"patch_size": 1, "in_channels": 4, "mlp_ratio": 2.0},
    ],
)
def test_forward_equals_the_papers_equations(config):
    model = fill(DiT(**SMALL, **config))
    x, t, y = inputs(model, 4)
    want = dit(model.state_dict(), x, t, y, heads=2, patch=model.patch_size)
    assert want.abs().mean() > 0.1  # not the blind network
    got = model(x, t, y)
    assert got.shape == want.shape
    assert error(got, want) < 4e-6
    # the sinusoid stays float32, as upstream's
    assert error(model.double()(x.double(), t, y), want) < 3e-6


# Rows and columns of a block's weights, in widths.
BLOCK = {
    "attn.qkv": (3, 1),
    "attn.proj": (1, 1),
    "mlp.fc1": (4, 1),
    "mlp.fc2": (1, 4),
    "adaLN_modulation.1": (6, 1),
}


def test_keys_and_shapes():
    """Compare DiT-S/4; test_sizes.py has the sizes of all models."""
    width = 384
    patch = 4
    with torch.device("meta"):
        model = DiT_models["DiT-S/4"](input_size=32)
    want = {
        "pos_embed": (1, (32 // patch) ** 2, width),
        "x_embedder.proj.weight": (width, 4, patch, patch),
        "x_embedder.proj.bias": (width,),
        "t_embedder.mlp.0.weight": (width, 256),
        "t_embedder.mlp.0.bias": (width,),
        "t_embedder.mlp.2.weight": (width, width),
        "t_embedder.mlp.2.bias": (width,),
        "y_embedder.embedding_table.weight": (1001, width),
        "final_layer.linear.weight": (patch * patch * 8, width),
        "final_layer.linear.bias": (patch * patch * 8,),
        "final_layer.adaLN_modulation.1.weight": (2 * width, width),
        "final_layer.adaLN_modulation.1.bias": (2 * width,),
    }
    for n in range(12):
        for name, (rows, columns) in BLOCK.items():
            want[f"blocks.{n}.{name}.weight"] = (rows * width, columns * width)
            want[f"blocks.{n}.{name}.bias"] = (rows * width,)
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == want
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    # another eps hardly shows in outputs
    kinds = {(norm.eps, norm.elementwise_affine) for norm in norms}
    assert len(norms) == 25 and kinds == {(1e-6, False)}


def test_constructors_have_upstreams_names():
    for name, build in DiT_models.items():
        assert getattr(models, name.replace("-", "_").replace("/", "_")) is build


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
