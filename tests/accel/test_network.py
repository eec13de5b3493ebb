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


def test_parts_of_the_network(network):
    """Tokens, blocks, and an attention that is given: what a rank evaluates."""
    x, t, y = inputs(network.model, 4)
    given, part = [], slice(4, 12)

    def attend(qkv, num_heads):
        given.append(qkv.clone())
        return network.attention(qkv, num_heads)

    with torch.no_grad():
        whole, condition, h = network.tokens(x, t, y), network.condition(t, y), network.embed(x)
        assert torch.equal(network.embed(x, part, copies=2), torch.cat([h, h])[:, part])
        assert torch.equal(network.forward_blocks(h.clone(), condition, attend), whole) and len(given) == 2
        network.forward_blocks(h[:, part].clone(), condition, attend, tokens=part)
        torch.testing.assert_close(given[2], given[0][:, part])  # rotated by where the tokens stand in the row
        shallow = network.shallow(1)
        assert shallow.tokens(x, t, y).shape == whole.shape and len(given) == 4
    assert (shallow.depth, network.depth) == (1, 2) and shallow.model is network.model
    assert "1 blocks" in shallow.describe() and "2 blocks" in network.describe()


def test_weights_of_another_shape_are_not_exchanged():
    one, other = Plain(small()), Plain(small(depth=3))
    for another in (other, Plain(small(num_heads=4))):  # heads show in no shape
        with pytest.raises(ValueError, match="weights of another shape"):
            one.exchange(another)


def test_what_a_network_has_nothing_to_do_for(network):
    assert not network.captures and network.overflowed() is None
    network.tune([64])


def test_a_run_by_the_index_of_its_evaluations(network):
    x, t, y = inputs(network.model, 2)
    scheduled, advance = network.schedule([900, 7, 900], y.tolist())
    advance(0)
    for index, time in enumerate((900, 7, 900)):
        want = network.forward(x, torch.full((2,), time), y)
        assert torch.equal(scheduled.forward(x, torch.full((2,), index), y), want)
