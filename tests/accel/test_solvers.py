"""diffusers' schedulers as processes, against the library driven by hand; guidance intervals."""

import inspect

import pytest
import torch
from networks import fast_network, guided, sample, small

from accel import Sampler
from accel.errors import UsageError
from accel.families.sit.network import SiT
from accel.network import Plain
from accel.sampling import denoise, upstream_noise
from accel.sampling.ancestral import Ancestral, Ddim
from accel.sampling.guidance import Guidance, Unguided
from accel.sampling.solvers import Solver, require_schedule
from accel.sampling.solvers import make_scheduler as make

diffusers = pytest.importorskip("diffusers")
CPU = torch.device("cpu")
Z = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([1, 5, 2])
BETAS = dict(beta_start=1e-4, beta_end=0.02, beta_schedule="linear")


def by_hand(scheduler, model, scale=None, channels=3, z=Z):
    """As the library's pipelines do it. scale: None is no guidance."""
    x = z * scheduler.init_noise_sigma
    n = len(z)
    y = torch.cat([LABELS[:n], torch.full_like(LABELS[:n], 8)])
    with torch.no_grad():
        for t in scheduler.timesteps:
            both = scheduler.scale_model_input(torch.cat([x, x]), t)
            eps = model(both, t.expand(2 * n), y)[:, :4]
            eps = (eps if scale is None else guided(eps, scale, channels))[:n]
            x = scheduler.step(eps, t, x).prev_sample
    return x


def changed_betas():
    """Return a scheduler whose table was changed by hand; its configuration is DiT's."""
    scheduler = diffusers.DDIMScheduler(**BETAS)
    scheduler.alphas_cumprod = scheduler.alphas_cumprod**2
    return scheduler


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


# Entries of configurations. Each alone is tried with each scheduler that has it.
ENTRIES = [
    ("use_karras_sigmas", True),
    ("use_exponential_sigmas", True),
    ("use_beta_sigmas", True),
    ("use_lu_lambdas", True),
    ("use_flow_sigmas", True),
    ("timestep_spacing", "linspace"),
    ("timestep_spacing", "leading"),
    ("timestep_spacing", "trailing"),
    ("timestep_type", "continuous"),
    ("interpolation_type", "log_linear"),
    ("solver_order", 1),
    ("solver_order", 3),
    ("solver_type", "bh1"),
    ("solver_type", "heun"),
    ("predict_x0", False),
    ("algorithm_type", "dpmsolver"),
    ("algorithm_type", "sde-dpmsolver++"),
    ("variance_type", "learned_range"),
    ("final_sigmas_type", "sigma_min"),
    ("lower_order_final", False),
    ("euler_at_final", True),
    ("set_alpha_to_one", False),
    ("skip_prk_steps", True),
    ("clip_sample", False),
    ("thresholding", True),
    ("rescale_betas_zero_snr", True),
]
# With these a scheduler samples another process, or reads other outputs.
NEVER = "use_flow_sigmas", "variance_type", "rescale_betas_zero_snr"
SAMPLED = [
    "DDIM",
    "DDIMParallel",
    "DEISMultistep",
    "DPMSolverMultistep",
    "DPMSolverSinglestep",
    "EulerDiscrete",
    "HeunDiscrete",
    "KDPM2Discrete",
    "LMSDiscrete",
    "PNDM",
    "UniPCMultistep",
]
# These draw noise, run from pictures to noise, have other betas or need other arguments.
REFUSED = [
    "CogVideoXDDIM",
    "CogVideoXDPM",
    "DDIMInverse",
    "DDPM",
    "DDPMParallel",
    "DPMSolverMultistepInverse",
    "EulerAncestralDiscrete",
    "IPNDM",
    "KDPM2AncestralDiscrete",
    "LCM",
    "RePaint",
    "SASolver",
    "TCD",
]


@pytest.mark.filterwarnings("ignore")  # of the library, of numpy: thousands
@pytest.mark.parametrize("name", [*SAMPLED, *REFUSED])
def test_each_scheduler_gives_the_librarys_latents_or_is_refused_by_name(name):
    make_one = getattr(diffusers, f"{name}Scheduler")
    parameters = inspect.signature(make_one).parameters
    betas = BETAS if "beta_start" in parameters else {}
    model = small(hidden_size=24, depth=1, input_size=4)
    accepted = set()
    for entry, value in [("prediction_type", "epsilon"), *ENTRIES]:
        if entry not in {"prediction_type", *parameters}:
            continue
        for steps in (2, 7):
            given = {entry: value} if entry in parameters else {}
            try:
                scheduler = make_one(**betas, **given)
            except (NotImplementedError, ValueError):  # the library's own refusal
                continue
            try:
                process = Solver(scheduler, steps)
            except UsageError as error:
                assert f"{name}Scheduler" in str(error) or entry in str(error)
                continue
            accepted.add((entry, value, steps))
            scheduler.set_timesteps(steps)
            want = by_hand(scheduler, model, z=Z[:1, :, :4, :4])
            for one in (process, Solver(scheduler, steps)):  # also of a used scheduler
                z = Z[:1, :, :4, :4]
                got = denoise(Plain(model), one, Unguided(), z, LABELS[:1], None)
                assert (got - want).abs().max() <= 1e-4 * want.abs().max(), (entry, value, steps)
    assert (("prediction_type", "epsilon", 7) in accepted) == (name in SAMPLED)
    assert bool(accepted) == (name in SAMPLED)
    assert not {entry for entry, *_ in accepted} & set(NEVER)


@pytest.mark.parametrize(
    "scheduler, steps, words",
    [
        (diffusers.PNDMScheduler(**BETAS), 2, "PNDMScheduler fails in 2 steps .ValueError: "),
        (diffusers.RePaintScheduler(**BETAS), 9, "RePaintScheduler fails in 9 steps .TypeError"),
        (
            make("unipc", solver_type="bh1"),
            9,
            "UniPCMultistepScheduler in 9 steps .* another process",
        ),
        (
            make("dpm++", use_flow_sigmas=True),
            9,
            "DPMSolverMultistepScheduler in 9 .* another process",
        ),
        (make("dpm++", use_flow_sigmas=True), 500, "DPMSolverMultistepScheduler in 500 .* another"),
        (make("dpm++", variance_type="learned_range"), 9, "DPMSolverMultistepScheduler fails in 9"),
        (
            make("dpm++", algorithm_type="sde-dpmsolver++"),
            9,
            "DPMSolverMultistepScheduler draws noise",
        ),
        (diffusers.DDIMInverseScheduler(**BETAS), 9, "DDIMInverseScheduler in 9 steps .* another"),
        (
            make("dpm++", prediction_type="v_prediction"),
            5,
            "prediction_type v_prediction, and only ep",
        ),
        (changed_betas(), 5, "the alphas_cumprod of DDIMScheduler are not DiT's"),
    ],
)
def test_what_cannot_be_sampled_by_is_a_line(scheduler, steps, words):
    with pytest.raises(UsageError, match=f"^sampler: .*{words}") as error:
        Solver(scheduler, steps)
    assert "\n" not in str(error.value)


CLIPS = "which clips latents; DiT's published configuration has"


@pytest.mark.parametrize(
    "scheduler, option",
    [
        (diffusers.DDIMScheduler(**BETAS), "clip_sample"),
        (diffusers.DDIMScheduler(**BETAS, clip_sample=False, thresholding=True), "thresholding"),
        (make("dpm++", thresholding=True), "thresholding"),
        (make("unipc", thresholding=True), "thresholding"),
        (diffusers.DDIMScheduler(**BETAS, clip_sample=False), None),
        (make("dpm++"), None),
        (make("unipc"), None),
    ],
)
def test_clipped_latents_are_the_librarys_and_a_line(scheduler, option, capsys):
    """The estimates of large latents leave (-1, 1)."""
    model = small()
    process = Solver(scheduler, 5)
    name = type(scheduler).__name__
    line = f"sampler: {name} has {option}=True, {CLIPS} {option}=False\n"
    assert capsys.readouterr().out == (line if option else "")
    scheduler.set_timesteps(5)
    want = by_hand(scheduler, model)
    got = denoise(Plain(model), process, Unguided(), Z, LABELS, None)
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
    assert (want.abs().max() <= 1.001) == (option is not None)


def test_other_betas_are_a_line():
    with pytest.raises(UsageError, match="x: its scheduler's trained_betas are not"):
        require_schedule("x", dict(trained_betas=5))  # other entries: tests/test_doors.py


def test_processes_are_values():
    others = (Ancestral(6), Ancestral(5, learn_sigma=False), Ddim(5), Ddim(5, eta=0.5))
    assert Ancestral(5) == Ancestral(5) and len({Ancestral(5), *others}) == 5
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


@pytest.mark.parametrize("process", [Ancestral(10), Solver(make("dpm++"), 10)])
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
