"""The reference models behind the protocol, to the bit, whole and in the parts that ranks evaluate."""

import pytest
import torch
from conftest import fill
from networks import evaluate, guided, inputs, small

from accel.families.large_dit.network import DiT_Llama
from accel.network import Plain
from accel.sampling.guidance import Guidance, Unguided


@pytest.fixture(params=("DiT", "Large-DiT"))
def network(request):
    if request.param == "DiT":
        return Plain(small())
    return Plain(fill(DiT_Llama(input_size=8, dim=96, n_layers=2, n_heads=2, num_classes=8, qk_norm=True)))


def test_it_is_the_model_to_the_bit(network):
    x, t, y = inputs(network.model, 4)
    with torch.no_grad():
        assert torch.equal(network.forward(x, t, y), network.model(x, t, y))
        want = network.model.forward_with_cfg(x, t, y, 3.0)
    assert torch.equal(evaluate(network, x, t, y, 3.0), want[:2])


def test_guidance():
    """Values, as keys of captured moves have to be; three channels as published, or all."""
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(6, 8, 4, 4, generator=generator)
    assert torch.equal(Guidance(2.5, 9).combine(out), guided(out, 2.5)[:3])
    every = Guidance(2.5, 9, channels=8).combine(out)
    assert torch.equal(every, out[3:] + 2.5 * (out[:3] - out[3:]))
    assert Guidance(2.5, 9).labels(torch.tensor([3, 1])).tolist() == [3, 1, 9, 9]
    assert Unguided().combine(out) is out and Unguided().labels(out) is out
    assert {Guidance(2.5, 9): 1, Unguided(): 2} == {Unguided(): 2, Guidance(2.5, 9): 1} != {Guidance(2.0, 9): 1}
    assert [Guidance(2.5, 9, interval=(0.3, 0.7)).at(level).copies for level in (0.29, 0.3, 0.7, 0.71)] == [1, 2, 2, 1]
