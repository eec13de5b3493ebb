"""Networks of several stages, and packings that leave a tensor unread."""

import pytest
import torch
from networks import SMALL, error, inputs, network_of, pack_of, small

from accel import fast
from accel.families.dit.network import DiT
from accel.fast.conditioning import BLOCK_VECTORS
from accel.fast.ops import HalfOps
from accel.runtime.network import EagerNetwork
from accel.runtime.stages import Stage

FRONT = 3  # tokens that enter before the second block
WIDTH = SMALL["hidden_size"]


class TwoStages(DiT):
    """A DiT in whose second block copies of a vector of (t, y) stand before the tokens."""

    def prepend(self, x, embedded, c):
        vector = self.blocks[0].adaLN_modulation(c)[:, None, :WIDTH]
        return torch.cat([vector.expand(-1, FRONT, -1), x], dim=1)

    @property
    def stages(self):
        first, later = list(self.blocks[:1]), list(self.blocks[1:])
        return [
            Stage(first, WIDTH, self.num_heads),
            Stage(later, WIDTH, self.num_heads, enter=self.prepend, prepended=FRONT),
        ]

    def forward(self, x, t, y):
        """Compute the network by definition."""
        c = self.condition(t, y)
        x = self.blocks[0](self.embed(x), c)
        x = self.prepend(x, None, c)
        for block in self.blocks[1:]:
            x = block(x, c)
        return self.unpatchify(self.head(x[:, FRONT:], c))


def prepend(x, embedded, condition):
    """TwoStages.prepend from the table of vectors."""
    vector = condition.table[condition.entry, 0].to(x.dtype)[:, None]
    return torch.cat([vector.expand(-1, FRONT, -1), x], dim=1)


def later_vectors(x, condition):
    """Return the vectors of the second block and later ones."""
    return condition._replace(table=condition.table[:, BLOCK_VECTORS:])


def in_two(network):
    """An accelerated DiT with the stages of TwoStages."""
    [whole] = network.stages
    network.stages = [
        whole._replace(blocks=whole.blocks[:1]),
        whole._replace(
            blocks=whole.blocks[1:], enter=prepend, modulate=later_vectors, prepended=FRONT
        ),
    ]
    return network


@pytest.fixture
def model():
    return small(TwoStages, depth=4)


@pytest.mark.parametrize("tier, tolerance", (("fp32", 1e-5), ("exact", 1e-5), ("fp16", 2e-3)))
def test_two_stages_compute_what_is_written_out(model, tier, tolerance):
    """The branches of the first stage's last block are added before tokens enter, and the head
    drops the tokens in front; the reference network and the accelerated one."""
    x, t, y = inputs(model, 4)
    with torch.no_grad():
        want = model.double()(x.double(), t, y)
        one_stage = DiT.forward(model, x.double(), t, y)
        model.float()
    assert error(one_stage, want) > 0.01  # the tokens in front count
    assert error(EagerNetwork(model).forward(x, t, y), want) < 1e-5
    network = in_two(network_of(model, tier))
    assert error(network.forward(x, t, y), want) < tolerance
    run = network.prepare(t.tolist(), y.tolist())
    run.advance(*range(4))
    assert error(network.forward(x, torch.arange(4), y, run), want) < tolerance


def test_a_packing_reads_every_tensor():
    model = small()
    ops = HalfOps(torch.float32, torch.device("cpu"))
    extra = {f"blocks.{i}.norm1.weight": torch.ones(WIDTH) for i in range(5)}
    with pytest.raises(ValueError, match=r"not use blocks\.0\.norm1\.weight, .* and 2 more; use"):
        fast.assemble({**model.state_dict(), **extra}, model, pack_of(model), ops)
