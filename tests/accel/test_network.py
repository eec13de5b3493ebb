"""The reference model behind the protocol: models.DiT to the bit, whole and in the parts that ranks evaluate."""

import pytest
import torch
from networks import guided, inputs, small

from accel.network import MODELS, PlainDiT, guide, rows_of_a_latent
from models import DiT_models, attention


@pytest.fixture
def network():
    return PlainDiT(small())


def test_it_is_the_model_to_the_bit(network):
    x, t, y = inputs(network.model, 4)
    with torch.no_grad():
        assert torch.equal(network.forward(x, t, y), network.model(x, t, y))
        want = network.model.forward_with_cfg(x, t, y, 3.0)
    assert torch.equal(network.forward_with_cfg(x, t, y, 3.0), want)
    other = x.clone()
    other[2:] = float("nan")  # only the first half is read
    assert torch.equal(network.forward_with_cfg(other, t, y, 3.0), want)


def test_guidance_and_unpatchify_are_written_once():
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(6, 8, 4, 4, generator=generator)
    assert torch.equal(guide(out, 2.5), guided(out, 2.5))
    assert set(MODELS) >= set(DiT_models)


def test_parts_of_the_network(network):
    """Tokens, blocks, and an attention that is given: what a rank evaluates."""
    x, t, y = inputs(network.model, 4)
    given = []

    def attend(qkv, num_heads):
        given.append((qkv.shape, num_heads))
        return attention(qkv, num_heads)

    with torch.no_grad():
        whole, condition = network.tokens(x, t, y), network.condition(t, y)
        h = network.embed(x)
        assert torch.equal(network.embed(x, slice(4, 12), copies=2), torch.cat([h, h])[:, 4:12])
        assert torch.equal(network.forward_blocks(h, condition, attend=attend), whole)
        assert given == [((4, 16, 3 * 144), 2)] * 2
        shallow = network.shallow(1)
        first = network.blocks[0](network.embed(x), condition, attention)
        assert torch.equal(shallow.tokens(x, t, y), network.model.final_layer(first, condition))
    assert (shallow.depth, network.depth, len(given)) == (1, 2, 2) and shallow.blocks is network.blocks
    assert "1 blocks" in shallow.describe() and "2 blocks" in network.describe()


def test_rows_that_share_a_latent():
    """With guidance two, unless ranks divide the rows of a picture."""
    assert [rows_of_a_latent(rows, True) for rows in (1, 2, 3, 16)] == [1, 2, 1, 2]
    assert [rows_of_a_latent(rows, False) for rows in (1, 2, 3, 16)] == [1, 1, 1, 1]


def test_the_protocols_defaults(network):
    """What a network has nothing to do for."""
    assert not network.captures and not network.fuses_update and network.overflowed() is None
    network.tune([64], lambda make: pytest.fail("there is nothing to share"))
    with network.sampling_run([5], [1]) as advance:
        advance(0)
