"""The random streams of an FID job."""

import pytest
import torch
from plans import plan

from accel.families.dit.network import DiT_models
from accel.families.sit.network import SiT_models
from accel.jobs.fid.folder import Batches
from accel.jobs.fid.noise import PictureNoise, UpstreamNoise
from accel.runtime.network import EagerNetwork
from accel.sampling import denoise
from accel.sampling.ancestral import Ancestral, Ddim
from accel.sampling.flow import FLOWS, Euler, Sde
from accel.sampling.guidance import Guidance
from accel.sampling.solvers import Solver

CPU = torch.device("cpu")
DRAWS = 3
STEPS = Sde(DRAWS + 1)  # its noise is the CPU's
DDPM = Ancestral(DRAWS)


def noise_of(kind, rank=0, world=1, process=DDPM, **more):
    chosen = plan(independent=kind is PictureNoise, **more)
    return kind(Batches(chosen, rank, world), CPU, process)


def of_pictures(kind, world, **more):
    """Of every picture: (z and the noise of two steps, label)."""
    found = {}
    for rank in range(world):
        noise = noise_of(kind, rank, world, **more)
        for batch in noise.batches.to_draw(set()):
            z, labels, draw = noise.batch(batch)
            if kind is PictureNoise:
                torch.randn(7)  # whatever else is drawn
            drawn = z, draw(), draw()
            for row, number in enumerate(noise.batches.pictures(batch)):
                found[number] = torch.stack([one[row] for one in drawn]), int(labels[row])
    return found


@pytest.mark.parametrize("rows", [1, 2])
def test_upstreams_stream_is_drawn_again(rows):
    """A resumed job skips finished batches wherever they are, and has the noise of an
    undisturbed one.
    """
    noise = noise_of(UpstreamNoise, world=2, drawn=rows)
    drawn = {}
    for batch in (0, 2, 4):
        z, labels, draw = noise.batch(batch)
        drawn[batch] = z, labels, *(draw() for _ in range(DRAWS))
    for missing in ([0, 4], [2], [4]):
        torch.manual_seed(99)
        again = noise_of(UpstreamNoise, world=2, drawn=rows)
        for batch in again.batches.to_draw(set(range(6)) - {*missing}):
            z, labels, draw = again.batch(batch)
            found = z, labels, *(draw() for _ in range(DRAWS))
            assert all(torch.equal(*pair) for pair in zip(found, drawn[batch], strict=True))
        assert batch == missing[-1]


PROCESSES = [
    Ancestral(6),
    Ddim(6),
    Solver("dpm++", 6),
    *(flow(6) for flow in FLOWS.values()),
]


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: type(process).__name__)
def test_a_process_draws_as_often_as_it_says(process):
    """A resumed job draws so often for every batch that it skips."""
    model = (
        SiT_models["SiT-Demo/2"] if type(process) in FLOWS.values() else DiT_models["DiT-Demo/2"]
    )
    drawn = []

    def draw():
        drawn.append(1)
        return torch.zeros(2, 4, 16, 16)

    x = torch.randn(2, 4, 16, 16)
    labels = torch.tensor([1, 2])
    denoise(EagerNetwork(model().eval()), process, Guidance(2.0, 8), x, labels, draw)
    assert len(drawn) == process.noise_draws


@pytest.mark.parametrize("seed", [0, 3, -5, 2**63])
def test_a_pictures_noise_is_its_own(seed):
    """The same in batches of two and of three, on any rank, and whatever else is drawn."""
    two = of_pictures(PictureNoise, 1, seed=seed)
    three = of_pictures(PictureNoise, 3, seed=seed, batch_size=3)
    assert sorted(two) == sorted(three) == list(range(12))
    assert all(
        torch.equal(two[number][0], three[number][0]) and two[number][1] == three[number][1]
        for number in two
    )
    assert len({values.numpy().tobytes() for values, _ in two.values()}) == 12
    assert len({label for _, label in two.values()}) > 2


def test_a_pictures_seed_is_the_documented_one():
    """Picture 5 of seed 3 follows from the rule of docs/fid.md, label first."""
    noise = noise_of(PictureNoise)
    z, labels, draw = noise.batch(2)  # pictures 4 and 5
    generator = torch.Generator().manual_seed((3 * 11400714819323198485 + 5) % 2**63)
    assert labels[1] == torch.randint(0, 8, (), generator=generator)
    assert torch.equal(z[1], torch.randn(4, 16, 16, generator=generator))
    assert torch.equal(draw()[1], torch.randn(4, 16, 16, generator=generator))


@pytest.mark.parametrize("kind", [UpstreamNoise, PictureNoise])
@pytest.mark.parametrize("world", [1, 3])
def test_balanced_labels_are_as_many_of_each_class_from_the_same_noise(kind, world):
    random, balanced = (
        of_pictures(kind, world, count=24, batch_size=4, labels=how)
        for how in ("random", "by_number")
    )
    assert all(balanced[number][1] == number % 8 for number in range(24))
    assert any(random[number][1] != number % 8 for number in range(24))
    assert all(torch.equal(balanced[number][0], random[number][0]) for number in range(24))


@pytest.mark.parametrize("world, count", [(1, 24), (2, 24), (3, 29)])
def test_permuted_labels_are_a_contiguous_part_a_rank(world, count):
    """RAE's rule: rank r has part r of one list; the pictures are interleaved nevertheless.
    The stream has z alone. Where 8 classes do not divide the pictures, the rest is random.
    """
    order_of_labels = dict(process=Euler(DRAWS), count=count, labels="permuted")
    n = 2
    rounds = -(-count // (n * world))
    generator = torch.Generator().manual_seed(3)
    of_classes = torch.tensor([label for label in range(8) for _ in range(count // 8)])
    all_labels = of_classes[torch.randperm(count // 8 * 8, generator=generator)].tolist()
    more = rounds * n * world - len(all_labels)
    if more:
        all_labels += torch.randint(0, 8, (more,), generator=generator).tolist()
    made = {}
    for rank in range(world):
        noise = noise_of(UpstreamNoise, rank, world, **order_of_labels)
        of_rank = all_labels[rank * rounds * n : (rank + 1) * rounds * n]
        stream = torch.Generator().manual_seed(3 * world + rank)
        for batch in noise.batches.to_draw(set()):
            z, labels, _ = noise.batch(batch)
            assert torch.equal(z, torch.randn(n, 4, 16, 16, generator=stream))
            first = batch // world * n
            assert labels.tolist() == of_rank[first : first + n]
            made |= dict(zip(noise.batches.pictures(batch), labels.tolist()))
        assert list(noise.batches.pictures(rank + world)) == [
            i * world + rank + n * world for i in range(n)
        ]
    assert sorted(made) == list(range(rounds * n * world))
    again = noise_of(UpstreamNoise, world - 1, world, **order_of_labels)
    for batch in again.batches.to_draw({0}):
        resumed, of_last, _ = again.batch(batch)
    assert torch.equal(resumed, z) and torch.equal(of_last, labels)


def test_permuted_labels_of_any_number_of_ranks():
    """Keyed by picture, they are those of one rank."""
    by_one = of_pictures(UpstreamNoise, 1, count=24, labels="permuted")
    by_three = of_pictures(PictureNoise, 3, count=24, batch_size=5, labels="permuted")
    labels = [by_three[number][1] for number in range(24)]
    assert labels == [by_one[number][1] for number in range(24)]
    assert sorted(labels) == [i // 3 for i in range(24)]


@pytest.mark.gpu
def test_noise_of_steps_from_the_cpu():
    """SiT's stream: z and labels of the GPU's generator, steps of the CPU's; both are
    drawn again.
    """
    chosen = plan()
    device = torch.device("cuda")
    torch.manual_seed(3)
    for _ in range(3):
        expected = [
            torch.randn(2, 4, 16, 16, device=device),
            torch.randint(0, 8, (2,), device=device),
        ]
        expected += [torch.randn(4, 4, 16, 16)[:2].to(device) for _ in range(DRAWS)]
    noise = UpstreamNoise(Batches(chosen, 0, 1), device, STEPS)
    for batch in range(3):
        z, labels, draw = noise.batch(batch)
        if batch < 2:
            for _ in range(DRAWS):
                draw()
    assert all(
        torch.equal(*pair)
        for pair in zip([z, labels, *(draw() for _ in range(DRAWS))], expected, strict=True)
    )
