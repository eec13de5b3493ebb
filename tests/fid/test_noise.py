"""The random streams of an FID job."""

import pytest
import torch
from orders import order

from accel.fid.folder import Batches
from accel.fid.noise import PictureNoise, UpstreamNoise

CPU = torch.device("cpu")


def noise_of(kind, rank=0, world=1, **more):
    chosen = order(independent=kind is PictureNoise, **more)
    return kind(chosen, Batches(chosen, rank, world), CPU)


def of_pictures(kind, world, **more):
    """Of every picture: (z and the noise of two steps, label)."""
    found = {}
    for rank in range(world):
        noise = noise_of(kind, rank, world, **more)
        for batch in noise.batches.left(set()):
            z, labels, draw = noise.batch(batch, None)
            if kind is PictureNoise:
                torch.randn(7)  # whatever else is drawn
            drawn = z, draw(), draw()
            for row, number in enumerate(noise.batches.pictures(batch)):
                found[number] = torch.stack([one[row] for one in drawn]), int(labels[row])
    return found


@pytest.mark.parametrize("copies", [1, 2])
def test_upstreams_stream(copies):
    """Seed once a rank; then z, labels and the steps' noise, batch after batch: of 2n rows with guidance."""
    noise = noise_of(UpstreamNoise, rank=1, world=2, copies=copies)
    drawn = [(z, labels, draw()) for z, labels, draw in (noise.batch(batch, None) for batch in (1, 3, 5))]
    torch.manual_seed(3 * 2 + 1)
    for z, labels, step in drawn:
        assert torch.equal(z, torch.randn(2, 4, 16, 16)) and torch.equal(labels, torch.randint(0, 8, (2,)))
        assert torch.equal(step, torch.randn(2 * copies, 4, 16, 16)[:2])


def test_upstreams_stream_resumes_from_a_recorded_state():
    noise, states, drawn = noise_of(UpstreamNoise, world=2), {}, {}
    for batch in (0, 2, 4):
        z, labels, draw = noise.batch(batch, states.get(batch - 2))
        drawn[batch] = z, labels, draw()
        states[batch] = noise.state()
    again = noise_of(UpstreamNoise, world=2)
    torch.manual_seed(99)
    for batch in (4, 2):  # in any order
        z, labels, draw = again.batch(batch, states[batch - 2])
        assert all(torch.equal(*pair) for pair in zip((z, labels, draw()), drawn[batch], strict=True))


@pytest.mark.parametrize("seed", [0, 3, -5, 2**63])
def test_a_pictures_noise_is_its_own(seed):
    """The same in batches of two and of three, on any rank, and whatever else is drawn."""
    two = of_pictures(PictureNoise, 1, seed=seed)
    three = of_pictures(PictureNoise, 3, seed=seed, batch_size=3)
    assert sorted(two) == sorted(three) == list(range(12))
    assert all(torch.equal(two[number][0], three[number][0]) and two[number][1] == three[number][1] for number in two)
    assert len({values.numpy().tobytes() for values, _ in two.values()}) == 12
    assert len({label for _, label in two.values()}) > 2


def test_a_pictures_seed_is_the_documented_one():
    """docs/fid.md: whoever knows the rule makes picture 5 of seed 3 by itself, label first."""
    noise = noise_of(PictureNoise)
    z, labels, draw = noise.batch(2, None)  # pictures 4 and 5
    generator = torch.Generator().manual_seed((3 * 11400714819323198485 + 5) % 2**63)
    assert labels[1] == torch.randint(0, 8, (), generator=generator)
    assert torch.equal(z[1], torch.randn(4, 16, 16, generator=generator))
    assert torch.equal(draw()[1], torch.randn(4, 16, 16, generator=generator))


@pytest.mark.parametrize("kind", [UpstreamNoise, PictureNoise])
@pytest.mark.parametrize("world", [1, 3])
def test_balanced_labels_are_as_many_of_each_class_from_the_same_noise(kind, world):
    random, balanced = (of_pictures(kind, world, count=24, batch_size=4, balanced=how) for how in (False, True))
    assert all(balanced[number][1] == number % 8 for number in range(24))
    assert any(random[number][1] != number % 8 for number in range(24))
    assert all(torch.equal(balanced[number][0], random[number][0]) for number in range(24))


@pytest.mark.gpu
def test_noise_of_steps_from_the_cpu():
    """SiT's stream: z and labels of the GPU's generator, steps of the CPU's; a record of both resumes it."""
    chosen, device = order(noise_from_cpu=True), torch.device("cuda")

    def begun():
        return UpstreamNoise(chosen, Batches(chosen, 0, 1), device)

    noise, drawn, states = begun(), [], [None]
    for batch in range(3):
        z, labels, draw = noise.batch(batch, None)
        drawn.append([z, labels, draw(), draw()])
        states.append(noise.state())
    torch.manual_seed(3)
    for z, labels, *steps in drawn:
        assert torch.equal(z, torch.randn(2, 4, 16, 16, device=device))
        assert torch.equal(labels, torch.randint(0, 8, (2,), device=device))
        assert all(torch.equal(step.cpu(), torch.randn(4, 4, 16, 16)[:2]) for step in steps)
    z, labels, draw = begun().batch(2, states[2])
    assert all(torch.equal(a, b) for a, b in zip([z, labels, draw(), draw()], drawn[2], strict=True))
