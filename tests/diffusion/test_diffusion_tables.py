import copy
import math
import pickle

import numpy as np
import pytest
import torch
from reference import Reference, cosine_betas, even_positions, linear_betas
from torch._subclasses.fake_tensor import FakeTensorMode

from diffusion import create_diffusion, space_timesteps
from diffusion import gaussian_diffusion as gd
from diffusion.respace import SpacedDiffusion

SCHEDULES = {"linear": linear_betas, "squaredcos_cap_v2": cosine_betas}


@pytest.mark.parametrize("steps", [1000, 300, 50])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tables_are_the_papers(schedule, steps):
    d = create_diffusion("", noise_schedule=schedule, diffusion_steps=steps)
    betas = SCHEDULES[schedule](steps)
    ref = Reference(betas)
    t = range(steps)
    expected = {
        "betas": betas,
        "alphas_cumprod": ref.abars,
        "alphas_cumprod_prev": [1.0] + ref.abars[:-1],
        "alphas_cumprod_next": ref.abars[1:] + [0.0],
        "sqrt_alphas_cumprod": [a**0.5 for a in ref.abars],
        "sqrt_one_minus_alphas_cumprod": [(1 - a) ** 0.5 for a in ref.abars],
        "log_one_minus_alphas_cumprod": [math.log(1 - a) for a in ref.abars],
        "sqrt_recip_alphas_cumprod": [a**-0.5 for a in ref.abars],
        "sqrt_recipm1_alphas_cumprod": [((1 - a) / a) ** 0.5 for a in ref.abars],
        "posterior_variance": [ref.posterior_variance(i) for i in t],
        "posterior_log_variance_clipped": [ref.log_variance("small", i) for i in t],
        "posterior_mean_coef1": [ref.posterior(1.0, 0.0, i)[0] for i in t],
        "posterior_mean_coef2": [ref.posterior(0.0, 1.0, i)[0] for i in t],
    }
    assert d.num_timesteps == steps
    for name, values in expected.items():
        table = getattr(d, name)
        assert table.dtype == np.float64 and table.shape == (steps,), name
        np.testing.assert_allclose(table, values, rtol=1e-9, atol=1e-12, err_msg=name)


def test_shapes_of_beta_schedules():
    def betas(name, steps=20):
        return gd.get_beta_schedule(name, beta_start=0.01, beta_end=0.09, num_diffusion_timesteps=steps)

    np.testing.assert_allclose(betas("linear"), [0.01 + 0.08 * i / 19 for i in range(20)])
    np.testing.assert_allclose(betas("quad"), [(0.1 + 0.2 * i / 19) ** 2 for i in range(20)])
    np.testing.assert_allclose(betas("warmup10"), [0.01] + [0.09] * 19)
    np.testing.assert_allclose(betas("warmup50"), [0.01 + 0.08 * i / 9 for i in range(10)] + [0.09] * 10)
    np.testing.assert_allclose(betas("const"), [0.09] * 20)
    np.testing.assert_allclose(betas("jsd"), [1 / (20 - i) for i in range(20)])
    assert gd.betas_for_alpha_bar(4, lambda u: 1 - u, max_beta=0.7) == pytest.approx([1 / 4, 1 / 3, 1 / 2, 0.7])


@pytest.mark.parametrize(
    "respacing, kept",
    [
        ("250", None),
        ("10,15,20", None),
        ("7", None),
        ("1", None),
        ([5, 0, 3], None),
        ("999", None),
        ("ddim50", list(range(0, 1000, 20))),
        ("ddim34", list(range(0, 1000, 30))),
        ("ddim1000", list(range(1000))),
        ("ddim1", [0]),
        ("", list(range(1000))),
        (None, list(range(1000))),
    ],
)
def test_respacing(respacing, kept):
    d = create_diffusion(respacing)
    if kept is None:
        counts = [int(c) for c in respacing.split(",")] if isinstance(respacing, str) else respacing
        sizes = [1000 // len(counts) + (i < 1000 % len(counts)) for i in range(len(counts))]
        positions = [
            p for i, (size, count) in enumerate(zip(sizes, counts)) for p in even_positions(size, count, sum(sizes[:i]))
        ]
        assert len(d.timestep_map) == len(positions)
        # The nearest timestep, and at a tie either neighbour.
        assert all(abs(t - p) <= 0.5 for t, p in zip(d.timestep_map, positions))
        kept = d.timestep_map
    assert d.timestep_map == kept and d.use_timesteps == set(kept)
    assert d.num_timesteps == len(kept) and d.original_num_steps == 1000
    ref = Reference(linear_betas(1000), kept)
    np.testing.assert_allclose(d.alphas_cumprod, ref.abars, rtol=1e-9)
    np.testing.assert_allclose(d.betas, [ref.beta(t) for t in range(len(ref))], rtol=1e-6)


def test_ties_round_as_published():
    # Stride 49.95 to 21 steps, added up in float64: 499.5 comes out just below or above, and decides.
    assert sorted(space_timesteps(1000, "21")) == [*range(0, 451, 50), *range(499, 1000, 50)]
    assert sorted(space_timesteps(1000, "250"))[120:130] == [481, 485, 489, 493, 497, 502, 506, 510, 514, 518]
    # A half goes to the even neighbour: adding a half and cutting off would give 167 and 833.
    assert sorted(space_timesteps(1000, "7")) == [0, 166, 333, 500, 666, 832, 999]


@pytest.mark.parametrize(
    "respacing, says",
    [
        ("ddim333", "no integer stride gives 333 of 1000"),
        ("ddim", "expected a number"),
        ("ddim0", "at least one step"),
        ("1001", "1001 steps of a section of 1000"),
        ("10,400,10", "400 steps of a section of 333"),
        ("0", "at least one step"),
        ("-3", "expected"),
        ("fast", "expected a number"),
        ("10,,20", "expected"),
        (250, "250"),
    ],
)
def test_impossible_respacing_says_why(respacing, says):
    with pytest.raises(ValueError, match=says) as error:
        create_diffusion(respacing)
    assert str(respacing) in str(error.value) and "\n" not in str(error.value)


def test_bad_processes_say_why():
    kinds = dict(
        model_mean_type=gd.ModelMeanType.EPSILON, model_var_type=gd.ModelVarType.FIXED_SMALL, loss_type=gd.LossType.MSE
    )
    for betas in ([], [0.0, 0.1], [0.1, 1.5], [[0.1]], [float("nan")]):
        with pytest.raises(ValueError, match="betas"):
            gd.GaussianDiffusion(betas=betas, **kinds)
    for kept in ([], [-1, 3], [3, 10]):
        with pytest.raises(ValueError, match="use_timesteps"):
            SpacedDiffusion(use_timesteps=kept, betas=linear_betas(100)[:10], **kinds)
    with pytest.raises(ValueError, match="cosine"):
        create_diffusion("", noise_schedule="cosine")
    with pytest.raises(ValueError, match="cubic"):
        gd.get_beta_schedule("cubic", beta_start=0.1, beta_end=0.2, num_diffusion_timesteps=4)
    with pytest.raises(ValueError, match="betas"):  # 1000 / T scales the last beta past 1
        create_diffusion("", diffusion_steps=10)


@pytest.mark.parametrize(
    "arguments, mean, var, loss",
    [
        ({}, "EPSILON", "LEARNED_RANGE", "MSE"),
        (dict(learn_sigma=False), "EPSILON", "FIXED_LARGE", "MSE"),
        (dict(learn_sigma=False, sigma_small=True), "EPSILON", "FIXED_SMALL", "MSE"),
        (dict(predict_xstart=True, rescale_learned_sigmas=True), "START_X", "LEARNED_RANGE", "RESCALED_MSE"),
        (dict(use_kl=True, rescale_learned_sigmas=True), "EPSILON", "LEARNED_RANGE", "RESCALED_KL"),
    ],
)
def test_create_diffusion_chooses_kinds(arguments, mean, var, loss):
    d = create_diffusion("10", **arguments)
    assert (d.model_mean_type.name, d.model_var_type.name, d.loss_type.name) == (mean, var, loss)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_any_integer_t(dtype):
    d = create_diffusion("200")
    t = torch.tensor([0, 3, 199], dtype=dtype)
    assert d.original_timesteps(t).tolist() == [d.timestep_map[i] for i in (0, 3, 199)]
    x = torch.ones(3, 2, 2)
    expected = torch.tensor(d.sqrt_alphas_cumprod[[0, 3, 199]], dtype=torch.float32).view(3, 1, 1) * x
    assert torch.equal(d.q_mean_variance(x, t)[0], expected)


def test_copies_and_pickles_leave_the_device_tables_behind():
    d = create_diffusion("25")
    x, t = torch.randn(2, 4, 3, 3), torch.tensor([0, 24])
    used = d.q_sample(x, t, noise=x)
    assert d._device_tables
    for other in (copy.deepcopy(d), pickle.loads(pickle.dumps(d)), copy.copy(d)):
        assert not other._device_tables and other.timestep_map == d.timestep_map
        assert torch.equal(other.q_sample(x, t, noise=x), used)
    assert len(pickle.dumps(d)) < 20_000


def test_tables_first_used_in_inference_mode_train_later():
    d = create_diffusion("25")
    with torch.inference_mode():
        d.p_sample_loop(lambda x, t: torch.cat([x, x], 1), (1, 2, 2, 2), device="cpu")
    assert not any(table.is_inference() for table in d._device_tables[torch.device("cpu")].values())
    weight = torch.ones((), requires_grad=True)
    x = torch.randn(2, 2, 2, 2)
    terms = d.training_losses(lambda x, t: torch.cat([weight * x, weight * x], 1), x, torch.tensor([1, 7]))
    terms["loss"].sum().backward()
    assert weight.grad.isfinite() and weight.grad != 0


def test_tables_are_uploaded_once_per_device_and_not_into_a_capture(monkeypatch):
    d = create_diffusion("25")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with FakeTensorMode():  # a CUDA device of shapes alone
        with pytest.raises(RuntimeError, match=r'prepare\("cuda:0"\)'):
            d.prepare("cuda")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        d.prepare("cuda")
        tables = d._device_tables[torch.device("cuda:0")]
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        d.prepare("cuda:0")
        assert d._device_tables[torch.device("cuda:0")] is tables and len(d._device_tables) == 1
        assert all(table.device == torch.device("cuda:0") for table in tables.values())


def test_processes_are_equal_by_value():
    """Equal tables: what was captured of one serves the other."""
    assert create_diffusion("25") == create_diffusion("25") and len({create_diffusion("5"), create_diffusion([5])}) == 1
    others = [
        create_diffusion("24"),
        create_diffusion("ddim25"),
        create_diffusion("25", noise_schedule="squaredcos_cap_v2"),
        create_diffusion("25", learn_sigma=False),
        create_diffusion("25", predict_xstart=True),
    ]
    assert all(create_diffusion("25") != other for other in others) and create_diffusion("25") != "25"
