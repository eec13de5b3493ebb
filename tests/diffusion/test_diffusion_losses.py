import numpy as np
import pytest
import torch
from reference import Reference, linear_betas, wavy

from diffusion import create_diffusion
from diffusion import gaussian_diffusion as gd
from diffusion.respace import SpacedDiffusion
from diffusion.timestep_sampler import LossSecondMomentResampler, UniformSampler, create_named_schedule_sampler

CLOSE = dict(rtol=2e-4, atol=1e-6)  # KLs near 0 are differences of float32 table entries
VARIANCES = {
    "range": gd.ModelVarType.LEARNED_RANGE,
    "log": gd.ModelVarType.LEARNED,
    "small": gd.ModelVarType.FIXED_SMALL,
    "large": gd.ModelVarType.FIXED_LARGE,
}


def process(respacing, loss=gd.LossType.MSE, variance="range", mean=gd.ModelMeanType.EPSILON):
    kept = create_diffusion(respacing).timestep_map
    d = SpacedDiffusion(
        use_timesteps=kept,
        betas=linear_betas(1000),
        model_mean_type=mean,
        model_var_type=VARIANCES[variance],
        loss_type=loss,
    )
    return d, Reference(linear_betas(1000), kept)


def batch(d, seed=0):
    t = torch.tensor([0, 1, d.num_timesteps // 2, d.num_timesteps - 1])
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 256, (4, 3, 4, 4), generator=generator)
    levels[:, 0, 0, :2] = torch.tensor([0, 255])  # both ends, where a level is the whole tail
    x0 = levels.double() / 127.5 - 1
    return t, x0, torch.randn(x0.shape, generator=generator, dtype=torch.float64)


def nearly(target, learned, wrong=0.1):
    """A model that misses `target` by a wavy tenth: no log probability is lost in the far tails."""

    def model(x, t, y=0.3):
        out = wavy(x, t, y)
        missed = target + wrong * out[:, :3]
        return torch.cat([missed, out[:, 3:]], dim=1) if learned else missed

    return model


@pytest.mark.parametrize("mean", gd.ModelMeanType)
@pytest.mark.parametrize("variance", VARIANCES)
@pytest.mark.parametrize("loss", gd.LossType)
@pytest.mark.parametrize("respacing", ["", "100"])
def test_training_losses(respacing, loss, variance, mean):
    d, ref = process(respacing, loss, variance, mean)
    t, x0, noise = batch(d)
    original = torch.tensor(d.timestep_map)[t]
    learned = variance in ("range", "log")
    xt = torch.stack([ref.noised(x0[i], int(t[i]), noise[i]) for i in range(4)])
    target = {
        gd.ModelMeanType.EPSILON: noise,
        gd.ModelMeanType.START_X: x0,
        gd.ModelMeanType.PREVIOUS_X: torch.stack([ref.posterior(x0[i], xt[i], int(t[i]))[0] for i in range(4)]),
    }[mean]
    wrong = 0.1 if mean is gd.ModelMeanType.EPSILON else 0.003
    model = nearly(target, learned, wrong)
    out = model(xt, original)
    prediction, values = out[:, :3], out[:, 3:] if learned else out

    bound = []
    for i in range(4):
        step = int(t[i])
        predicted_mean = prediction[i]
        if mean is gd.ModelMeanType.EPSILON:
            predicted_mean = ref.posterior(ref.x0(xt[i], step, prediction[i]), xt[i], step)[0]
        elif mean is gd.ModelMeanType.START_X:
            predicted_mean = ref.posterior(prediction[i], xt[i], step)[0]
        bound.append(ref.bound_term(x0[i], xt[i], step, predicted_mean, ref.log_variance(variance, step, values[i])))
    bound = torch.stack(bound)

    terms = d.training_losses(model, x0, t, noise=noise)
    assert all(term.shape == (4,) for term in terms.values())

    def check_bound(got, scale):
        torch.testing.assert_close(got[1:], scale * bound[1:], rtol=1e-3, atol=2e-6 * scale)
        assert got[0] == pytest.approx(scale * bound[0].item(), rel=0.02)  # tanh for erf

    if loss.is_vb():
        assert set(terms) == {"loss"}
        check_bound(terms["loss"], d.num_timesteps if loss is gd.LossType.RESCALED_KL else 1)
        return
    mse = ((target - prediction) ** 2).mean(dim=(1, 2, 3))
    torch.testing.assert_close(terms["mse"], mse, rtol=1e-4, atol=1e-6)
    if not learned:
        assert set(terms) == {"mse", "loss"} and torch.equal(terms["loss"], terms["mse"])
        return
    assert set(terms) == {"mse", "vb", "loss"}
    check_bound(terms["vb"], d.num_timesteps / 1000 if loss is gd.LossType.RESCALED_MSE else 1)
    assert torch.equal(terms["loss"], terms["mse"] + terms["vb"])


@pytest.mark.parametrize("loss", [gd.LossType.MSE, gd.LossType.RESCALED_MSE, gd.LossType.RESCALED_KL])
def test_autograd_is_the_derivative_of_the_loss(loss):
    d, _ = process("", loss)
    t, x0, noise = batch(d)
    variance_values = (0.8 * torch.cos(5 * x0)).requires_grad_(True)
    prediction = (noise + 0.05 * torch.sin(7 * x0)).requires_grad_(loss is gd.LossType.RESCALED_KL)
    inputs = [variance_values] + [prediction] * prediction.requires_grad
    halves = prediction.detach().requires_grad_(True), variance_values

    def total(values, predicted=prediction):
        return d.training_losses(lambda x, t: torch.cat([predicted, values], 1), x0, t, noise=noise)["loss"].sum()

    assert torch.autograd.gradcheck(total, inputs, eps=1e-6, atol=1e-5, rtol=1e-3, fast_mode=True)
    if loss is gd.LossType.MSE:  # each term trains its own half of the output, and nothing else (Nichol, section 3.1)
        terms = d.training_losses(lambda x, t: torch.cat([halves[0], halves[1]], 1), x0, t, noise=noise)
        for name, own in (("mse", 0), ("vb", 1)):
            gradients = torch.autograd.grad(terms[name].sum(), halves, retain_graph=True)
            assert gradients[own].abs().max() > 1e-6 and not gradients[1 - own].any()


@pytest.mark.parametrize("clip", [True, False])
def test_bits_per_dimension(clip):
    d, ref = process("40")
    _, x0, _ = batch(d)
    model = lambda x, t: wavy(x, t) * 0.5  # noqa: E731
    torch.manual_seed(11)
    out = d.calc_bpd_loop(model, x0, clip_denoised=clip)
    assert set(out) == {"total_bpd", "prior_bpd", "vb", "xstart_mse", "mse"}
    prior = torch.stack([ref.prior_term(x) for x in x0])
    torch.testing.assert_close(out["prior_bpd"], prior, rtol=1e-3, atol=1e-7)

    torch.manual_seed(11)
    for column, step in enumerate(reversed(range(40))):  # from t = T-1
        noise = torch.randn_like(x0)
        xt = ref.noised(x0, step, noise)
        eps, values = model(xt, torch.full((4,), d.timestep_map[step])).split(3, dim=1)
        predicted = ref.x0(xt, step, eps)
        predicted = predicted.clamp(-1, 1) if clip else predicted
        mean = ref.posterior(predicted, xt, step)[0]
        torch.testing.assert_close(out["xstart_mse"][:, column], ((predicted - x0) ** 2).mean((1, 2, 3)), **CLOSE)
        torch.testing.assert_close(
            out["mse"][:, column], ((ref.eps(xt, step, predicted) - noise) ** 2).mean((1, 2, 3)), rtol=2e-3, atol=1e-6
        )
        if step:
            log_variance = ref.log_variance("range", step, values)
            bound = torch.stack([ref.bound_term(x0[i], xt[i], step, mean[i], log_variance[i]) for i in range(4)])
            torch.testing.assert_close(out["vb"][:, column], bound, rtol=1e-3, atol=1e-6)
    assert (out["vb"][:, -1] > 0).all() and out["vb"].shape == (4, 40)
    torch.testing.assert_close(out["total_bpd"], out["vb"].sum(1) + out["prior_bpd"])
    assert not out["total_bpd"].requires_grad


# ---- which timesteps to train on ----


def test_uniform_sampler():
    sampler = create_named_schedule_sampler("uniform", create_diffusion("20"))
    assert isinstance(sampler, UniformSampler)
    np.random.seed(0)
    t, weights = sampler.sample(20_000, "cpu")
    assert t.dtype == torch.int64 and weights.dtype == torch.float32 and torch.equal(weights, torch.ones(20_000))
    assert (torch.bincount(t, minlength=20) - 1000).abs().max() < 150
    with pytest.raises(ValueError, match="importance"):
        create_named_schedule_sampler("importance", create_diffusion("20"))


def test_second_moment_resampler():
    d = create_diffusion("4")
    sampler = create_named_schedule_sampler("loss-second-moment", d)
    assert isinstance(sampler, LossSecondMomentResampler)
    sampler = LossSecondMomentResampler(d, history_per_term=2, uniform_prob=0.1)
    sampler.update_with_local_losses(torch.tensor([0, 0, 1, 1, 2, 2, 3]), torch.tensor([9.0, 1, 2, 2, 0, 0, 1]))
    assert (sampler.weights() == 1).all()  # t = 3 still lacks one
    sampler.update_with_local_losses(torch.tensor([3, 0]), torch.tensor([7.0, 3]))  # 9 leaves the history of t = 0
    root = np.array([5.0, 4.0, 0.0, 25.0]) ** 0.5
    expected = 0.9 * root / root.sum() + 0.1 / 4
    np.testing.assert_allclose(sampler.weights(), expected)

    # Weighted, the mean of any loss is the uniform mean.
    np.random.seed(1)
    t, weights = sampler.sample(100_000, "cpu")
    loss = torch.tensor([1.0, -2.0, 0.5, 3.0])
    assert (loss[t] * weights).mean() == pytest.approx(loss.mean().item(), abs=0.03)
    assert torch.bincount(t, minlength=4).numpy() / 1e5 == pytest.approx(expected, abs=0.01)
