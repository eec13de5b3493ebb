"""The denoising loop: the random stream draw by draw, every kind of network in it, captured steps."""

import pytest
import torch
from networks import build, error, fast_network, sample, small

from accel.fast.conditioning import ConditioningTable
from accel.network import Plain
from accel.sampling import initial_noise
from accel.sampling.ancestral import Ancestral
from diffusion import create_diffusion

CPU = torch.device("cpu")


def test_random_stream_draw_by_draw(monkeypatch):
    """z, then at every step, the last included, one normal of 2n rows; a share of the batch draws it all too."""
    network, diffusion = Plain(small()), create_diffusion("7")
    torch.manual_seed(11)
    want = [torch.randn(3, 4, 8, 8)] + [torch.randn(6, 4, 8, 8) for _ in range(7)]
    after = torch.get_rng_state()
    labels = torch.tensor([1, 2, 3])
    seen, p_sample = [], diffusion.p_sample
    monkeypatch.setattr(
        diffusion, "p_sample", lambda *a, noise, **k: (seen.append(noise), p_sample(*a, noise=noise, **k))[1]
    )

    def run(scale=4.0, **how):
        generator = torch.Generator().manual_seed(11)
        z = initial_noise(3, 4, 8, generator)
        assert torch.equal(z, want[0])
        found = sample(network, Ancestral(diffusion), z, labels, scale, generator=generator, **how)
        return found, generator.get_state()

    whole, state = run()
    assert all(torch.equal(a, b[:3]) for a, b in zip(seen, want[1:], strict=True))
    assert torch.equal(state, after)
    part, state = run(rows=slice(1, 3))
    assert torch.equal(state, after) and torch.equal(torch.get_rng_state(), after)  # torch's own was left alone
    assert (part - whole[1:]).abs().max() <= 1e-5 * whole.abs().max()  # other GEMMs, which add in another order
    seen.clear()
    run(None)  # n rows a step without guidance
    torch.manual_seed(11)
    want = [torch.randn(3, 4, 8, 8) for _ in range(8)]
    assert all(torch.equal(a, b) for a, b in zip(seen, want[1:], strict=True))


@pytest.mark.parametrize("scale", (3.0, None))
def test_every_network_gives_the_same_latents(scale):
    """The plain one, and the accelerated one with its conditioning hoisted and not. The random state is the same after
    all of them; on_step sees every step's result."""
    process = Ancestral(create_diffusion("6"))
    z, labels = torch.randn(3, 4, 8, 8), torch.tensor([0, 3, 3])
    plain, hoisted, direct = Plain(small()), *(fast_network(small(), torch.float32) for _ in range(2))
    direct.hoists = False
    results = []
    for network in (plain, hoisted, direct):
        torch.manual_seed(1)
        seen = []
        latents = sample(network, process, z, labels, scale, on_step=lambda i, x, seen=seen: seen.append((i, x)))
        assert [i for i, _ in seen] == list(range(6)) and torch.equal(seen[-1][1], latents)
        results.append((latents, torch.get_rng_state()))
    for latents, random_state in results[1:]:
        assert latents.isfinite().all() and error(latents, results[0][0].double()) < 1e-5
        assert torch.equal(random_state, results[0][1])
    assert hoisted.table is not None and direct.table is None


#################################################################################
#                                   On a GPU                                    #
#################################################################################

gpu = pytest.mark.gpu


def latents_and_sums(network, process, z, labels, scale, **how):
    """Latents from a fixed seed, and a sum for every step."""
    sums = torch.zeros(process.steps, device=z.device)
    torch.manual_seed(5)

    def on_step(index, x):
        torch.sum(x.flatten(), 0, out=sums[index])

    return sample(network, process, z, labels, scale, on_step=on_step, **how), sums


@gpu
@pytest.mark.parametrize("scale", (4.0, None))
def test_a_captured_run_is_the_direct_run_bit_for_bit(scale):
    """All steps, over chunks of the table, twice through the same graph with other labels and noise, and one share of
    the batch."""
    model, device = build("DiT-Demo/2").cuda(), torch.device("cuda")
    process = Ancestral(create_diffusion("25"))
    direct, captured = (fast_network(model, torch.float16, device) for _ in range(2))
    direct.captures = False
    for network in (direct, captured):
        network.table = ConditioningTable(network.conditioning, 60 * network.conditioning.bias.numel() * 4)
    for seed, labels in ((0, [0, 1, 2, 3]), (1, [7, 7, 2, 5])):
        z = torch.randn(4, 4, 16, 16, generator=torch.Generator().manual_seed(seed)).cuda()
        y = torch.tensor(labels, device=device)
        for rows in (slice(None), slice(1, 3)):
            (want, sums), (got, graph_sums) = (
                latents_and_sums(network, process, z, y, scale, rows=rows) for network in (direct, captured)
            )
            again, _ = latents_and_sums(direct, process, z, y, scale, rows=rows)
            assert want.isfinite().all() and torch.equal(again, want), "the direct run itself varies"
            differ = (graph_sums != sums).nonzero()
            assert not len(differ), f"the first step that differs: {int(differ[0])}"
            assert torch.equal(got, want)
    # One step, two shapes, each captured once.
    assert [len(replayed.graphs) for replayed in captured._replayed.values()] == [2] and not direct._replayed


@gpu
@pytest.mark.parametrize("scale", (4.0, None))
@pytest.mark.parametrize("kind", ("plain", "fast"))
def test_no_copy_and_no_wait_in_the_loop(kind, scale):
    """In a second run, nothing after the first step waits for the device or moves data to or from it."""
    device, model, process = torch.device("cuda"), build("DiT-Demo/2").cuda(), Ancestral(create_diffusion("10"))
    network = Plain(model) if kind == "plain" else fast_network(model, torch.float16, device)
    z, labels = torch.randn(4, 4, 16, 16, device=device), torch.arange(4, device=device)
    latents_and_sums(network, process, z, labels, scale)
    profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    )

    def on_step(index, x):
        if index == 0:  # by now the labels were read and the timesteps uploaded
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            profile.start()

    try:
        x = sample(network, process, z, labels, scale, on_step=on_step)
        profile.stop()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    copies = [event.name for event in profile.events() if "HtoD" in event.name or "DtoH" in event.name]
    assert len(profile.events()) and not copies and x.isfinite().all()
