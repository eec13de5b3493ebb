"""diffusers' schedulers as processes, against the library driven by hand; guidance intervals."""

import pytest
import torch
from networks import fast_network, guided, sample, small

from accel import Sampler
from accel.diffusion import create_diffusion
from accel.errors import UsageError
from accel.families.sit.network import SiT
from accel.network import Plain
from accel.sampling import denoise, upstream_noise
from accel.sampling.ancestral import Ancestral
from accel.sampling.guidance import Guidance
from accel.sampling.solvers import Solver, require_schedule
from accel.sampling.solvers import make_scheduler as make

diffusers = pytest.importorskip("diffusers")
CPU = torch.device("cpu")
Z = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([1, 5, 2])


def by_hand(scheduler, model, scale, channels):
    """As the library's pipelines do it."""
    x = Z * scheduler.init_noise_sigma
    y = torch.cat([LABELS, torch.full_like(LABELS, 8)])
    with torch.no_grad():
        for t in scheduler.timesteps:
            both = scheduler.scale_model_input(torch.cat([x, x]), t)
            eps = guided(model(both, t.expand(6), y)[:, :4], scale, channels)[:3]
            x = scheduler.step(eps, t, x).prev_sample
    return x


@pytest.mark.parametrize("channels", (3, 4))
@pytest.mark.parametrize(
    "name, config",
    [("dpm++", {}), ("dpm++", dict(solver_order=3, use_karras_sigmas=True)), ("unipc", {})],
)
def test_latents_are_the_librarys(name, config, channels):
    scheduler = make(name, **config)
    assert torch.allclose(scheduler.betas, torch.linspace(1e-4, 0.02, 1000))
    scheduler.set_timesteps(7)
    want = by_hand(scheduler, small(), 3.0, channels)
    networks = Plain(small()), fast_network(small(), torch.float32)
    guidance = Guidance(3.0, 8, channels)
    before = torch.get_rng_state()
    for network in networks:
        for _ in range(2):  # a second run begins anew
            got = denoise(network, Solver(make(name, **config), 7), guidance, Z, LABELS, None)
            assert (got - want).abs().max() <= 1e-4 * want.abs().max()
    assert torch.equal(torch.get_rng_state(), before)  # nothing is drawn


def test_a_scheduler_that_evaluates_twice_a_step():
    """The caller's scheduler stays as it is, at whichever step it stands."""
    heun = diffusers.HeunDiscreteScheduler(beta_start=1e-4, beta_end=0.02, beta_schedule="linear")
    heun.set_timesteps(9)
    process = Solver(heun, 4)
    assert process.evaluations == 7
    got = denoise(Plain(small()), process, Guidance(2.0, 8), Z, LABELS, None)
    assert len(heun.timesteps) == 17 and heun.step_index is None
    heun.set_timesteps(4)
    want = by_hand(heun, small(), 2.0, 3)
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def test_what_cannot_be_sampled_by_is_a_line():
    ancestral = diffusers.EulerAncestralDiscreteScheduler()
    with pytest.raises(UsageError, match="sampler: this scheduler draws noise in its steps"):
        denoise(Plain(small()), Solver(ancestral, 3), Guidance(2.0, 8), Z, LABELS, None)
    with pytest.raises(
        UsageError,
        match="sampler: its scheduler has prediction_type v_prediction, and only epsilon ",
    ):
        # other entries: tests/test_doors.py
        Solver(make("dpm++", prediction_type="v_prediction"), 5)
    with pytest.raises(UsageError, match="x: its scheduler's trained_betas are not"):
        require_schedule("x", dict(trained_betas=5))


def test_processes_are_values():
    assert Solver(make("dpm++"), 5) == Solver(make("dpm++"), 5) and hash(Solver(make("unipc"), 5))
    assert (
        len(
            {
                Solver(make("dpm++"), 5),
                Solver(make("dpm++"), 6),
                Solver(make("dpm++", solver_order=3), 5),
            }
        )
        == 3
    )


@pytest.mark.parametrize("process", [Ancestral(create_diffusion("10")), Solver(make("dpm++"), 10)])
def test_outside_the_interval_half_the_rows_are_evaluated(process):
    """At noise levels from 0.3 to 0.7 guided, elsewhere the conditional estimate alone."""
    network = Plain(small())
    rows = []
    condition = network.condition
    network.condition = lambda t, y: (rows.append((int(t[0]), len(y))), condition(t, y))[1]
    guidance = Guidance(3.0, 8, interval=(0.3, 0.7))
    torch.manual_seed(0)
    got = denoise(network, process, guidance, Z, LABELS, upstream_noise(Z, 2))
    assert rows == [(time, 6 if 300 <= time <= 700 else 3) for time in process.times()]
    assert {n for _, n in rows} == {3, 6}
    torch.manual_seed(0)
    assert got.isfinite().all() and not torch.equal(got, sample(network, process, Z, LABELS, 3.0))


def test_a_scheduler_for_a_sampler():
    """By its name, and as an object with a configuration of its own; other weights than a
    DiT's are refused.
    """
    how = dict(device="cpu", num_sampling_steps=5, output_type="latent")
    found = []
    for given in ("unipc", make("unipc"), make("unipc", solver_order=1)):
        with Sampler("DiT-Demo/2", sampler=given, **how) as sampler:
            found.append(
                (
                    sampler.latents([1, 3], seed=4),
                    sampler.latents([1, 3], seed=4, num_sampling_steps=4),
                )
            )
    assert all(map(torch.equal, found[0], found[1])) and not any(
        map(torch.equal, found[0], found[2])
    )
    with pytest.raises(
        UsageError,
        match="sampler: a scheduler takes estimates of noise, and this is a flow; give sde",
    ):
        Sampler(small(SiT), sampler=make("unipc"), **how)
