"""large_dit.py against the network as it is defined, in float64; its names, shapes,
guidance and training.
"""

import pytest
import torch
from networks import with_norms

from accel.families.large_dit import network as module
from accel.families.large_dit.network import DiT_Llama, Large_DiT_models

SMALL = dict(input_size=8, dim=144, n_layers=3, n_heads=3, num_classes=10)
FORMS = (
    {},
    {"qk_norm": True},
    {"qk_norm": True, "n_kv_heads": 1},
    {"n_heads": 6, "n_kv_heads": 3, "learn_sigma": False, "patch_size": 4},
    {"multiple_of": 32, "ffn_dim_multiplier": 0.5, "in_channels": 3},
)


def build(**form):
    return with_norms(DiT_Llama(**{**SMALL, **form}))


@pytest.mark.parametrize("qk_norm", (False, True))
def test_keys_and_shapes(qk_norm):
    """Compare the smallest model; test_sizes.py has the sizes of all models."""
    dim = 1536
    hidden = 4096
    c = 1024
    with torch.device("meta"):
        model = Large_DiT_models["Large-DiT-600M/2"](qk_norm=qk_norm)
    want = {
        "x_embedder.weight": (dim, 16),
        "x_embedder.bias": (dim,),
        "t_embedder.mlp.0.weight": (c, 256),
        "t_embedder.mlp.0.bias": (c,),
        "t_embedder.mlp.2.weight": (c, c),
        "t_embedder.mlp.2.bias": (c,),
        "y_embedder.embedding_table.weight": (1001, c),
        "final_layer.linear.weight": (32, dim),
        "final_layer.linear.bias": (32,),
        "final_layer.adaLN_modulation.1.weight": (2 * dim, c),
        "final_layer.adaLN_modulation.1.bias": (2 * dim,),
    }
    for n in range(16):
        block = {
            **{f"attention.w{name}.weight": (dim, dim) for name in "qkvo"},
            "feed_forward.w1.weight": (hidden, dim),
            "feed_forward.w3.weight": (hidden, dim),
            "feed_forward.w2.weight": (dim, hidden),
            "attention_norm.weight": (dim,),
            "ffn_norm.weight": (dim,),
            "adaLN_modulation.1.weight": (6 * dim, c),
            "adaLN_modulation.1.bias": (6 * dim,),
        }
        if qk_norm:
            block |= {
                f"attention.{q}_norm.{kind}": (dim,) for q in "qk" for kind in ("weight", "bias")
            }
        want |= {f"layers.{n}.{name}": shape for name, shape in block.items()}
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == want
    assert model.input_size == 32


@pytest.mark.parametrize("size", ("600M", "3B", "7B"))
def test_constructors_have_the_originals_names(size):
    assert getattr(module, f"DiT_Llama_{size}_patch2") is Large_DiT_models[f"Large-DiT-{size}/2"]


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="width 100 does not divide into 3 heads"):
        DiT_Llama(**{**SMALL, "dim": 100})
