"""The random streams of an FID job."""

from types import SimpleNamespace

import pytest
import torch

from accel.fid.folder import Batches
from accel.fid.noise import PictureNoise, UpstreamNoise
from accel.options import DistributedOptions

CPU = torch.device("cpu")


def noise_of(kind, rank, world, seed=3, n=2):
    """Noise of one rank; of an engine it reads these three only."""
    options = DistributedOptions(model="DiT-Demo/2", num_fid_samples=12, per_proc_batch_size=n, seed=seed)
    options.world_independent_noise = kind is PictureNoise
    engine = SimpleNamespace(options=options.resolve(), device=CPU, network=SimpleNamespace(in_channels=4))
    return kind(engine, Batches(options, rank, world))


def test_upstreams_stream():
    """Seed once a rank; then z, labels and the steps' noise, batch after batch."""
    noise = noise_of(UpstreamNoise, rank=1, world=2)
    drawn = [(*noise.batch(batch, None)[:2], torch.randn(4, 4, 16, 16)) for batch in (1, 3, 5)]
    torch.manual_seed(3 * 2 + 1)
    for z, labels, step in drawn:
        assert torch.equal(z, torch.randn(2, 4, 16, 16)) and torch.equal(labels, torch.randint(0, 8, (2,)))
        assert torch.equal(step, torch.randn(4, 4, 16, 16))


def test_upstreams_stream_resumes_from_a_recorded_state():
    noise, states, drawn = noise_of(UpstreamNoise, rank=0, world=2), {}, {}
    for batch in (0, 2, 4):
        drawn[batch] = noise.batch(batch, states.get(batch - 2))
        torch.randn(100)
        states[batch] = noise.state()
    again = noise_of(UpstreamNoise, rank=0, world=2)
    torch.manual_seed(99)
    for batch in (4, 2):  # in any order
        z, labels, draw = again.batch(batch, states[batch - 2])
        assert torch.equal(z, drawn[batch][0]) and torch.equal(labels, drawn[batch][1]) and draw is None


@pytest.mark.parametrize("seed", [0, 3, -5, 2**63])
def test_a_pictures_noise_is_its_own(seed):
    """The same in batches of two and of three, on any rank, and whatever else is drawn."""

    def of_pictures(n, world):
        found = {}
        for rank in range(world):
            noise = noise_of(PictureNoise, rank, world, seed, n)
            for batch in noise.batches.left(set()):
                z, labels, draw = noise.batch(batch, None)
                torch.randn(7)
                steps = draw(), draw()
                for row, number in enumerate(noise.batches.pictures(batch)):
                    found[number] = torch.cat([z[row].flatten(), *(step[row].flatten() for step in steps)]), labels[row]
        return found

    two, three = of_pictures(2, 1), of_pictures(3, 3)
    assert sorted(two) == sorted(three) == list(range(12))
    assert all(torch.equal(two[number][0], three[number][0]) and two[number][1] == three[number][1] for number in two)
    assert len({values.numpy().tobytes() for values, _ in two.values()}) == 12
    assert len({int(label) for _, label in two.values()}) > 2


def test_a_pictures_seed_is_the_documented_one():
    """docs/fid.md: whoever knows the rule makes picture 5 of seed 3 by itself, label first."""
    noise = noise_of(PictureNoise, rank=0, world=1, seed=3)
    z, labels, draw = noise.batch(2, None)  # pictures 4 and 5
    generator = torch.Generator().manual_seed((3 * 11400714819323198485 + 5) % 2**63)
    assert labels[1] == torch.randint(0, 8, (), generator=generator)
    assert torch.equal(z[1], torch.randn(4, 16, 16, generator=generator))
    assert torch.equal(draw()[1], torch.randn(4, 16, 16, generator=generator))
