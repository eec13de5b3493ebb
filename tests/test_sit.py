"""SiT: the equations in float64, the published keys and shapes. Guidance and training:
test_families.py.
"""

import pytest
import torch
from conftest import fill
from networks import error
from reference_networks import dit

from accel.families.dit.network import DiT_models
from accel.families.sit import network as sit
from accel.families.sit.network import SiT, SiT_models

SMALL = dict(input_size=8, hidden_size=144, depth=3, num_heads=2, num_classes=10)


@pytest.mark.parametrize(
    "changes", ({}, {"learn_sigma": False}, {"patch_size": 4, "in_channels": 3})
)
def test_forward_equals_the_equations(changes):
    """DiT's of a time from 0 to 1, the first half of the channels where sigma is learned."""
    model = fill(SiT(**{**SMALL, **changes}))
    channels = model.in_channels
    x = torch.randn(4, channels, 8, 8)
    t = torch.tensor([0.0, 0.3, 0.96, 1.0])
    y = torch.tensor([0, 3, 9, 10])
    want = dit(model.state_dict(), x, t, y, heads=2, patch=model.patch_size)[:, :channels]
    got = model(x, t, y)
    assert got.shape == want.shape == x.shape and want.abs().mean() > 0.1  # not the blind network
    assert error(got, want) < 4e-6
    assert error(model(x, 1 - t, y), want) > 1e-2  # time counts


def test_configurations_have_dits_keys_and_shapes():
    assert [name.replace("SiT", "DiT") for name in SiT_models] == list(DiT_models)
    for name, build in SiT_models.items():
        assert getattr(sit, name.replace("-", "_").replace("/", "_")) is build
        how = {} if name != "SiT-Demo/2" else dict(learn_sigma=False)
        with torch.device("meta"):
            model = build(depth=2)
            of_dit = DiT_models[name.replace("SiT", "DiT")](depth=2, **how)
        want = {key: value.shape for key, value in of_dit.state_dict().items()}
        assert {key: value.shape for key, value in model.state_dict().items()} == want
        assert (
            type(model) is SiT
            and model.num_heads == of_dit.num_heads
            and model.learn_sigma == (not how)
        )
