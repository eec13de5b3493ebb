"""large_dit.py against the network as it is defined, in float64; its names, shapes,
guidance and training.
"""

import pytest
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


@pytest.mark.parametrize("size", ("600M", "3B", "7B"))
def test_constructors_have_the_originals_names(size):
    assert getattr(module, f"DiT_Llama_{size}_patch2") is Large_DiT_models[f"Large-DiT-{size}/2"]


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="width 100 does not divide into 3 heads"):
        DiT_Llama(**{**SMALL, "dim": 100})
