"""Schedules of betas, the timesteps that respacing keeps, and the tables of a process."""

import copy
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from reference import Reference, cosine_betas, linear_betas
from torch._subclasses.fake_tensor import FakeTensorMode

from diffusion import create_diffusion, space_timesteps
from diffusion import gaussian_diffusion as gd
from diffusion.respace import SpacedDiffusion


@pytest.mark.parametrize("steps", [1000, 50])
@pytest.mark.parametrize(
    "schedule, betas", [("linear", linear_betas), ("squaredcos_cap_v2", cosine_betas)]
)
def test_schedules_are_the_papers(schedule, betas, steps):
    d = create_diffusion("", noise_schedule=schedule, diffusion_steps=steps)
    assert d.num_timesteps == steps and d.posterior_mean_coef1.dtype == np.float64
    np.testing.assert_allclose(d.betas, betas(steps), rtol=1e-9)


def test_shapes_of_beta_schedules():
    for name, want in {
        "linear": [0.01 + 0.08 * i / 19 for i in range(20)],
        "quad": [(0.1 + 0.2 * i / 19) ** 2 for i in range(20)],
        "warmup10": [0.01] + [0.09] * 19,
        "warmup50": [0.01 + 0.08 * i / 9 for i in range(10)] + [0.09] * 10,
        "const": [0.09] * 20,
        "jsd": [1 / (20 - i) for i in range(20)],
    }.items():
        got = gd.get_beta_schedule(name, beta_start=0.01, beta_end=0.09, num_diffusion_timesteps=20)
        np.testing.assert_allclose(got, want)
    assert gd.betas_for_alpha_bar(4, lambda u: 1 - u, max_beta=0.7) == pytest.approx(
        [1 / 4, 1 / 3, 1 / 2, 0.7]
    )


@pytest.mark.parametrize("respacing", ["250", "10,15,20", "7", "1", [5, 0, 3], "999"])
def test_respacing(respacing):
    """Keeps the timesteps nearest to evenly spaced ones of each section, whose first and
    last it holds; at a tie either neighbour. Exact fractions say where these lie.
    """
    d = create_diffusion(respacing)
    positions = []
    start = 0
    counts = [int(c) for c in respacing.split(",")] if isinstance(respacing, str) else respacing
    for section, count in enumerate(counts):
        size = 1000 // len(counts) + (section < 1000 % len(counts))
        positions += [start + Fraction(k * (size - 1), max(count - 1, 1)) for k in range(count)]
        start += size
    assert all(abs(t - p) <= 0.5 for t, p in zip(d.timestep_map, positions, strict=True))
    assert d.use_timesteps == set(d.timestep_map) and d.original_num_steps == 1000
    ref = Reference(linear_betas(1000), d.timestep_map)
    t = torch.arange(d.num_timesteps)
    np.testing.assert_allclose(d.alphas_cumprod, ref.abar(t).flatten(), rtol=1e-9)
    np.testing.assert_allclose(d.betas, ref.beta(t).flatten(), rtol=1e-6)


def test_even_strides_and_ties_are_the_published_ones():
    for respacing, stride in {
        "ddim50": 20,
        "ddim34": 30,
        "ddim1000": 1,
        "ddim1": 1000,
        "": 1,
        None: 1,
    }.items():
        assert create_diffusion(respacing).timestep_map == list(range(0, 1000, stride))
    # Stride 49.95 to 21 steps, added up in float64: 499.5 comes out just below or above,
    # and decides.
    assert sorted(space_timesteps(1000, "21")) == [*range(0, 451, 50), *range(499, 1000, 50)]
    assert sorted(space_timesteps(1000, "250"))[120:130] == [
        481,
        485,
        489,
        493,
        497,
        502,
        506,
        510,
        514,
        518,
    ]
    # A half goes to the even neighbour: adding a half and cutting off would give 167 and
    # 833.
    assert sorted(space_timesteps(1000, "7")) == [0, 166, 333, 500, 666, 832, 999]


def test_impossible_processes_say_why():
    for respacing, says in {
        "ddim333": "no integer stride gives 333 of 1000",
        "ddim": "expected a number",
        "1001": "1001 steps of a section of 1000",
        "10,400,10": "400 steps of a section of 333",
        "0": "at least one step",
        "10,,20": "expected",
        250: "250",
    }.items():
        with pytest.raises(ValueError, match=says) as error:
            create_diffusion(respacing)
        assert str(respacing) in str(error.value) and "\n" not in str(error.value)
    kinds = dict(
        model_mean_type=gd.ModelMeanType.EPSILON,
        model_var_type=gd.ModelVarType.FIXED_SMALL,
        loss_type=gd.LossType.MSE,
    )
    for betas in ([], [0.0, 0.1], [0.1, 1.5], [[0.1]], [float("nan")]):
        with pytest.raises(ValueError, match="betas"):
            gd.GaussianDiffusion(betas=betas, **kinds)
    gd.GaussianDiffusion(betas=[0.1, 1.0], **kinds)  # ends in pure noise
    for kept in ([], [-1, 3], [3, 10]):
        with pytest.raises(ValueError, match="use_timesteps"):
            SpacedDiffusion(use_timesteps=kept, betas=linear_betas(100)[:10].numpy(), **kinds)
    with pytest.raises(ValueError, match="cosine"):
        create_diffusion("", noise_schedule="cosine")


def test_create_diffusion_chooses_kinds():
    for arguments, mean, variance, loss in (
        ({}, "EPSILON", "LEARNED_RANGE", "MSE"),
        (dict(learn_sigma=False), "EPSILON", "FIXED_LARGE", "MSE"),
        (dict(learn_sigma=False, sigma_small=True), "EPSILON", "FIXED_SMALL", "MSE"),
        (
            dict(predict_xstart=True, rescale_learned_sigmas=True),
            "START_X",
            "LEARNED_RANGE",
            "RESCALED_MSE",
        ),
        (dict(use_kl=True), "EPSILON", "LEARNED_RANGE", "RESCALED_KL"),
    ):
        d = create_diffusion("10", **arguments)
        assert (d.model_mean_type.name, d.model_var_type.name, d.loss_type.name) == (
            mean,
            variance,
            loss,
        )


def test_copies_have_no_device_tables_and_take_any_integer_t():
    d = create_diffusion("25")
    x = torch.randn(2, 4, 3, 3)
    used = d.q_sample(x, torch.tensor([0, 24]), noise=x)
    for other in (copy.deepcopy(d), pickle.loads(pickle.dumps(d)), copy.copy(d)):
        assert not other._device_tables and other.timestep_map == d.timestep_map
        assert torch.equal(
            other.q_sample(x, torch.tensor([0, 24], dtype=torch.uint8), noise=x), used
        )


def test_tables_first_used_in_inference_mode_train_later():
    d = create_diffusion("25")
    with torch.inference_mode():
        d.p_sample_loop(lambda x, t: torch.cat([x, x], 1), (1, 2, 2, 2), device="cpu")
    weight = torch.ones((), requires_grad=True)
    x = torch.randn(2, 2, 2, 2)
    terms = d.training_losses(
        lambda x, t: torch.cat([weight * x, weight * x], 1), x, torch.tensor([1, 7])
    )
    terms["loss"].sum().backward()
    assert weight.grad.isfinite() and weight.grad != 0


def test_a_trace_leaves_tables_with_values_and_finds_none():
    def step(d):
        x = torch.ones(2, 4, 3, 3)
        return d.p_sample(lambda x, t: torch.cat([x, x], 1), x, torch.tensor([0, 24]), noise=x)

    d = create_diffusion("25")
    for _ in range(2):
        with FakeTensorMode():
            step(d)
        assert torch.equal(step(d)["sample"], step(create_diffusion("25"))["sample"])


def test_tables_are_not_uploaded_into_a_capture(monkeypatch):
    d = create_diffusion("25")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with FakeTensorMode(), pytest.raises(RuntimeError, match=r'prepare\("cuda:0"\)'):
        d.prepare("cuda")
