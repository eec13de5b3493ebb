"""Solvers of diffusers as processes, against the library driven by hand; guidance intervals."""

import pytest
import torch
from networks import fast_network, guided, small

from accel.runtime.network import EagerNetwork
from accel.sampling import denoise
from accel.sampling.ancestral import Ancestral, Ddim
from accel.sampling.guidance import Guidance
from accel.sampling.solvers import Solver

diffusers = pytest.importorskip("diffusers")
Z = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([1, 5, 2])
BETAS = dict(beta_start=1e-4, beta_end=0.02, beta_schedule="linear")
SCHEDULERS = {
    "dpm++": diffusers.DPMSolverMultistepScheduler,
    "unipc": diffusers.UniPCMultistepScheduler,
}


def by_hand(scheduler, model, scale, channels):
    """Sample as the library's pipelines do."""
    x = Z * scheduler.init_noise_sigma
    n = len(Z)
    y = torch.cat([LABELS[:n], torch.full_like(LABELS[:n], 8)])
    with torch.no_grad():
        for t in scheduler.timesteps:
            both = scheduler.scale_model_input(torch.cat([x, x]), t)
            eps = model(both, t.expand(2 * n), y)[:, :4]
            eps = guided(eps, scale, channels)[:n]
            x = scheduler.step(eps, t, x).prev_sample
    return x


@pytest.mark.parametrize("channels", (3, 4))
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("steps", (1, 7))
def test_latents_are_the_librarys(name, steps, channels):
    scheduler = SCHEDULERS[name](**BETAS)
    scheduler.set_timesteps(steps)
    want = by_hand(scheduler, small(), 3.0, channels)
    networks = EagerNetwork(small()), fast_network(small(), torch.float32)
    guidance = Guidance(3.0, 8, channels)
    before = torch.get_rng_state()
    for network in networks:
        for _ in range(2):  # a second run begins anew
            got = denoise(network, Solver(name, steps), guidance, Z, LABELS, None)
            assert (got - want).abs().max() <= 1e-4 * want.abs().max()
    assert torch.equal(torch.get_rng_state(), before)  # nothing is drawn


def test_processes_are_values():
    others = (Ancestral(6), Ancestral(5, learn_sigma=False), Ddim(5), Ddim(5, eta=0.5))
    assert Ancestral(5) == Ancestral(5) and len({Ancestral(5), *others}) == 5
    assert Solver("dpm++", 5) == Solver("dpm++", 5)
    assert len({Solver("dpm++", 5), Solver("dpm++", 6), Solver("unipc", 5)}) == 3
