"""SiT's samplers against their equations, written out in float64; REPA's weights as a SiT's."""

import copy

import networks
import pytest
import torch
from conftest import mistake
from forks import succeeds
from networks import Original, error, guided, opened, sample, sde
from reference_networks import dit
from torch import nn

from accel import Sampler, accelerate
from accel.config.options import Options
from accel.families import repa
from accel.families.identify import families_with
from accel.families.repa.weights import convert as turned
from accel.families.sit.network import SiT
from accel.runtime.network import EagerNetwork
from accel.sampling import denoise, make_process, upstream_noise
from accel.sampling.flow import Euler, Heun, Sde
from accel.sampling.guidance import Guidance
from accel.tensors.shapes import shapes_of

Z = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([1, 5, 2])
NULL = torch.full_like(LABELS, 8)


def small(**changes):
    model = networks.small(SiT, **changes)
    # a velocity of the size of x: latents stay near one
    model.final_layer.linear.weight.data.mul_(0.2)
    return model


def velocity(model, scale=4.0, channels=3, interval=(0.0, 1.0)):
    """x (2n, 4, 8, 8) as SiT's loop has it, t, the noise level that decides guidance → v
    for both halves, float64.
    """
    state = model.state_dict()

    def v(x, t, level):
        rows = dit(
            state, torch.cat([x[:3], x[:3]]), torch.full((6,), t), torch.cat([LABELS, NULL]), 2, 2
        )[:, :4]
        inside = interval[0] <= round(level, 6) <= interval[1]
        return guided(rows, scale, channels) if inside else torch.cat([rows[:3], rows[:3]])

    return v


def ode(v, x, steps, heun=False, shift=1, last=1.0):
    """The library's loop over noise levels 1 … 1 − last. Guidance of a correction is that of its
    step's start.
    """
    even = [last * i / steps for i in range(steps + 1)]
    times = [shift * t / (1 + (shift - 1) * t) for t in even]
    for i, (t, end) in enumerate(zip(times, times[1:])):
        level = 1 - t
        slope = v(x, t, level)
        if heun and i < steps - 1:
            slope = (slope + v(x + (end - t) * slope, end, level)) / 2
        x = x + (end - t) * slope
    return x


@pytest.mark.parametrize("learn_sigma", (True, False))
def test_latents_and_random_stream_are_sits(learn_sigma):
    """Its own draws: 2n rows a step from the CPU, none for the last step, none for an ODE."""
    model = small(learn_sigma=learn_sigma)
    both = torch.cat([Z, Z]).double()
    v = velocity(model)
    network = EagerNetwork(model)
    torch.manual_seed(3)
    want = sde(v, both, 12, lambda: torch.randn(6, 4, 8, 8).double())[:3]
    after = torch.get_rng_state()
    torch.manual_seed(3)
    assert error(sample(network, Sde(12), Z, LABELS), want) < 2e-6 and want.std() < 3
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(3)
    assert error(sample(network, Sde(12), Z, LABELS, rows=slice(1, 3)), want[1:]) < 5e-6  # a rank's
    for process, heun in ((Euler(9), False), (Heun(9), True), (Heun(1), True)):
        got = denoise(network, process, Guidance(4.0, 8), Z, LABELS, None)
        assert error(got, ode(v, both, process.steps, heun)[:3]) < 1e-6
    assert len(Heun(9).times()) == 17 and Heun(9).steps == 9 == len(Euler(9).times())


@pytest.mark.parametrize("process, heun", ((Euler(10), False), (Heun(10), True), (Sde(25), None)))
def test_an_interval_and_all_channels(process, heun):
    """A step's start decides, as in REPA, and both ends of the interval are included."""
    model = small()
    interval = (0.2, 0.6)
    v = velocity(model, 4.0, 4, interval)
    guidance = Guidance(4.0, 8, 4, interval)
    both = torch.cat([Z, Z]).double()
    draws = torch.randn(25, 6, 4, 8, 8)
    want = iter(draws.double())
    steps = iter(draws[:, :3])
    want = sde(v, both, 25, lambda: next(want)) if heun is None else ode(v, both, 10, heun)
    got = denoise(EagerNetwork(model), process, guidance, Z, LABELS, lambda: next(steps))
    assert error(got, want[:3]) < 2e-6
    assert error(got, ode(velocity(model, 4.0, 4), both, 10, bool(heun))[:3]) > 1e-3


@pytest.mark.parametrize("sigma", (6.928203, 1.0))
@pytest.mark.parametrize("interval", ((0.0, 1.0), (0.25, 1.0)))
def test_even_times_that_end_before_one(sigma, interval):
    """RAE's Euler: t from 1 at noise, t_i = 1 − 0.999·i/N and then σ·t/(1 + (σ − 1)·t), whose
    network estimates noise − data. Both ends of the interval are of the shifted t, and inside.
    """
    steps = 6
    times = [1 - 0.999 * i / steps for i in range(steps)]
    levels = [sigma * t / (1 + (sigma - 1) * t) for t in times]
    if interval[0]:  # a time exactly: it is inside
        interval = (levels[4], levels[1])
    model = small()
    both = torch.cat([Z, Z]).double()
    want = ode(velocity(model, 3.0, 4, interval), both, steps, shift=1 / sigma, last=0.999)
    process = make_process("euler", steps, shift=1 / sigma, last_time=0.999)
    guidance = Guidance(3.0, 8, 4, interval)
    network = EagerNetwork(model)
    got = denoise(network, process, guidance, Z, LABELS, None)
    assert error(got, want[:3]) < 1e-6
    of_all = denoise(network, Euler(steps, 1 / sigma), guidance, Z, LABELS, None)
    assert error(got, of_all) > 1e-4
    guided_at = [guidance.at(level) is guidance for level in process.noise_levels()]
    assert guided_at == [interval[0] <= t <= interval[1] for t in levels]


def test_heun_ends_with_the_even_times():
    """The last step is Euler's, to the last time."""
    model = small()
    want = ode(velocity(model), torch.cat([Z, Z]).double(), 5, True, 0.3, 0.9)
    process = Heun(5, 0.3, last_time=0.9)
    got = denoise(EagerNetwork(model), process, Guidance(4.0, 8), Z, LABELS, None)
    assert error(got, want[:3]) < 1e-6


def test_repas_weights_turned_are_a_sits():
    """REPA's time is 1 − t, its velocity −v; its projectors go."""
    model = small(learn_sigma=False)
    theirs = {**model.state_dict(), "projectors.0.0.weight": torch.randn(3, 3)}
    assert families_with(shapes_of(theirs)) == [repa.FAMILY]
    ours = copy.deepcopy(model)
    ours.load_state_dict(turned(theirs), strict=True)
    t = torch.tensor([0.0, 0.3, 1.0])
    x = Z
    assert (
        error(
            ours(x, 1 - t, LABELS).detach(),
            -model.double()(x.double(), t.double(), LABELS).detach(),
        )
        < 2e-6
    )


BATCH_NORM_STATISTICS = {
    "bn.running_mean": torch.arange(4.0),
    "bn.running_var": torch.full((4,), 9.0),
    "bn.num_batches_tracked": torch.tensor(7),
}
AFFINE_STATISTICS = {
    "latents_bias": torch.arange(4.0).view(1, 4, 1, 1),
    "latents_scale": torch.full((1, 4, 1, 1), 1 / 3),
}


@pytest.mark.parametrize("statistics", (BATCH_NORM_STATISTICS, AFFINE_STATISTICS))
@pytest.mark.parametrize("place", ("among the weights", "beside them"))
def test_statistics_of_latents_that_repas_weights_hold(statistics, place, tmp_path, here, tiny_vae):
    """REPA-E's normalisation of latents, in a converted file too."""
    theirs = {**small(learn_sigma=False).state_dict(), "projectors.0.0.weight": torch.ones(3, 3)}
    content = {"ema": theirs, **statistics}
    if place == "among the weights":
        content = {"ema": {**theirs, **statistics}}
    torch.save({**content, "args": dict(num_heads=2)}, tmp_path / "x.pt")
    files = "--ckpt", tmp_path / "x.pt", "--output", tmp_path / "y.safetensors"
    succeeds(here("scripts/convert_checkpoint.py", *files))
    for name in "x.pt", "y.safetensors":
        options = Options(ckpt=tmp_path / name, device="cpu", output_type="latent")
        run = opened(options)
        assert run.spec.family.name == "REPA"
        latents = torch.randn(2, 4, 8, 8)
        want = 3 * latents + torch.arange(4.0)[:, None, None]
        assert torch.allclose(run.space.to_decoder(latents), want)
        content = dict(mean=torch.ones(1, 4, 1, 1), std=torch.ones(1, 4, 1, 1))
        torch.save(content, tmp_path / "own.pt")  # the user's file goes first
        own = dict(latent_stats=tmp_path / "own.pt", vae=tiny_vae, output_type="image")
        run = opened(options.changed(**own))
        assert torch.allclose(run.space.to_decoder(latents), latents + 1)


@pytest.mark.parametrize("left", [*list(BATCH_NORM_STATISTICS)[:2], *AFFINE_STATISTICS])
def test_half_of_the_statistics_of_latents_is_refused(left, tmp_path):
    theirs = {**small(learn_sigma=False).state_dict(), "projectors.0.0.weight": torch.ones(3, 3)}
    pair = next(pair for pair in (BATCH_NORM_STATISTICS, AFFINE_STATISTICS) if left in pair)
    content = {"ema": {**theirs, left: pair[left]}, "args": dict(num_heads=2)}
    torch.save(content, tmp_path / "x.pt")
    with mistake("ckpt", left):
        opened(Options(ckpt=tmp_path / "x.pt", device="cpu", output_type="latent"))


# ---- the networks, and weights that callers hold ----


class OfSit(Original):
    pass


class OfRepa(Original):
    def __init__(self, model):
        super().__init__(model)
        self.projectors = nn.ModuleList([nn.Linear(144, 8)])

    def forward(self, x, t, y):
        return super().forward(x, t, y), [torch.zeros(len(x), 16, 8)]


class OfRepaAlone(OfRepa):
    """What a class that derives from REPA's may be: no projectors, one output."""

    def __init__(self, model):
        super().__init__(model)
        del self.projectors
        self.path_type = "edm"  # whatever it says: REPA's code keeps it, SiT's does not

    def forward(self, x, t, y):
        return super().forward(x, t, y)[0]


OfRepaAlone.__name__ = "SiT"
OfSit.__name__ = OfRepa.__name__ = "SiT"


@pytest.mark.parametrize("kind", (lambda model: model, OfSit, OfRepa, OfRepaAlone))
def test_accelerate_takes_the_original_and_repas_class(kind):
    """And renews their weights."""
    model = kind(small(learn_sigma=kind not in (OfRepa, OfRepaAlone))).eval()
    x = torch.randn(4, 4, 8, 8)
    t = torch.tensor([0.1, 0.5, 0.96, 1.0])
    y = torch.tensor([1, 2, 8, 8])
    fast = accelerate(model)
    for factor in (1, 1.5):
        model.load_state_dict({name: factor * value for name, value in model.state_dict().items()})
        fast.load_state_dict(model.state_dict())
        # REPA's forward has one more argument, which sampling leaves at False.
        outputs = fast.forward(x, t, y, return_logvar=False), model(x, t, y)
        got, want = (out[0] if kind is OfRepa else out for out in outputs)
        assert got.shape == x.shape and error(got, want.detach().double()) < 1e-5


def test_guidance_of_an_accelerated_repa():
    x = torch.randn(4, 4, 8, 8)
    t = torch.tensor([0.1, 0.5] * 2)
    y = torch.tensor([1, 2, 8, 8])
    model = OfRepa(small(learn_sigma=False)).eval()  # its recipe guides all channels
    cond, uncond = model(torch.cat([x[:2]] * 2), t, y)[0].detach().double().chunk(2)
    assert (
        error(accelerate(model).forward_with_cfg(x, t, y, 3.0)[:2], uncond + 3 * (cond - uncond))
        < 1e-5
    )


@pytest.mark.parametrize("kind", [OfRepa, OfRepaAlone])
def test_a_sampler_of_a_sit_and_of_repas(kind):
    """SiT's default is its SDE; REPA's class gives the same latents as the SiT that its
    weights are turned into.
    """
    model = small(learn_sigma=False)
    theirs = kind(copy.deepcopy(model))
    ours = copy.deepcopy(model)
    ours.load_state_dict(turned(model.state_dict()))
    how = dict(precision="fp32", device="cpu", output_type="latent", num_sampling_steps=4)
    found = []
    for one in (theirs, ours):
        with Sampler(one, **how) as sampler:
            assert sampler.run.settings.sampler == "sde"
            given = (
                sampler.run.settings.cfg_scale,
                sampler.run.settings.guidance_channels,
                sampler.run.settings.guidance_interval,
            )
            # REPA's recipe
            assert given == ((1.8, 4, (0.0, 0.7)) if one is theirs else (4.0, 3, (0.0, 1.0)))
        with Sampler(
            one, **how, cfg_scale=4.0, guidance_channels=3, guidance_interval=(0, 1)
        ) as sampler:
            found.append(sampler.latents([1, 5, 2], seed=7))
    torch.manual_seed(7)
    z = torch.randn(3, 4, 8, 8)
    want = denoise(
        EagerNetwork(ours),
        Sde(4),
        Guidance(4.0, 8),
        z,
        LABELS.new_tensor([1, 5, 2]),
        upstream_noise(z, 2),
    )
    assert all(error(one, want.double()) < 1e-5 for one in found)
