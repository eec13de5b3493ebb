"""Patch embedding and last layer as split GEMMs, used on Hopper if they are large."""

import pytest
import test_jit
import test_rae
import torch
from networks import DEVICES, error, network_of
from reference_networks import jit

from accel import fast
from accel.fast.ops import Float32Linear


def jit_definition(model):
    return jit(model.state_dict(), *test_jit.inputs(), test_jit.START)


def rae_definition(model):
    return test_rae.velocity(model, *test_rae.inputs())


@DEVICES
@pytest.mark.parametrize("tier, most", (("exact", 4e-6), ("fp16", 2e-3)))
@pytest.mark.parametrize(
    "of_family, definition", ((test_jit, jit_definition), (test_rae, rae_definition))
)
def test_a_network_with_split_outer_layers(of_family, definition, tier, most, device, monkeypatch):
    """Split outer layers compute the definition, embed tokens by parts, as ranks do, and follow a
    refresh.
    """

    def split_layer(gemm, split=None, half=False):
        return Float32Linear(gemm, True, half)

    monkeypatch.setattr("accel.fast.network.Float32Linear", split_layer)
    monkeypatch.setattr("accel.fast.conditioning.Float32Linear", split_layer)
    monkeypatch.setattr("accel.fast.conditioning.splits", lambda weight: True)
    model = of_family.build()
    network = network_of(model, tier, device)
    x, t, y = (value.to(device) for value in of_family.inputs())
    assert error(network.forward(x, t, y).cpu(), definition(model)) < most
    for call in fast.warmup_calls(network, len(x)):
        call()

    def embed(*arguments, **options):
        """Return the embeddings of all stages, concatenated."""
        embedded = network.embed(*arguments, **options)
        return torch.cat(embedded, -1) if isinstance(embedded, tuple) else embedded

    whole = embed(x)
    parts = [embed(x, part) for part in (slice(5), slice(5, None))]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(embed(x, copies=2), torch.cat([whole, whole]))
    other = network_of(of_family.build(3), tier, device)
    before = network.forward(x, t, y)
    network.copy_weights(other)
    after = network.forward(x, t, y)
    assert torch.equal(after, other.forward(x, t, y)) and error(after, before.double().cpu()) > 0.1
