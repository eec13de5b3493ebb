import pytest
import torch
from reference import Reference, level_log_probability, linear_betas, slope, wavy, wavy_mean

from diffusion import create_diffusion, diffusion_utils
from diffusion import gaussian_diffusion as gd
from diffusion.respace import SpacedDiffusion

# Tables are float32: at the noisy end x_0 = 157 x_t - 157 eps magnifies their last bit.
CLOSE = dict(rtol=3e-6, atol=3e-5)
RESPACINGS = ["", "250", "ddim50", "10,15,20", "1"]
VARIANCES = {
    "range": gd.ModelVarType.LEARNED_RANGE,
    "log": gd.ModelVarType.LEARNED,
    "small": gd.ModelVarType.FIXED_SMALL,
    "large": gd.ModelVarType.FIXED_LARGE,
}


def process(respacing="250", variance="range", mean=gd.ModelMeanType.EPSILON):
    d = create_diffusion(respacing)
    d = SpacedDiffusion(
        use_timesteps=d.timestep_map,
        betas=linear_betas(1000),
        model_mean_type=mean,
        model_var_type=VARIANCES[variance],
        loss_type=gd.LossType.MSE,
    )
    return d, Reference(linear_betas(1000), d.timestep_map)


def batch(d, seed=0, shape=(3, 4, 4)):
    """One row at each of the timesteps where something is special, and in between."""
    t = torch.tensor(sorted({0, min(1, len(d.betas) - 1), d.num_timesteps // 2, d.num_timesteps - 1}))
    generator = torch.Generator().manual_seed(seed)
    x, x0, noise = torch.randn(3, len(t), *shape, generator=generator, dtype=torch.float64)
    return t, x, 0.5 * x0, noise


def rows(t, function, *tensors):
    """The reference, which knows one timestep: row by row."""
    return torch.stack([torch.as_tensor(function(int(t[i]), *(a[i] for a in tensors))) for i in range(len(t))])


def reference_model(d, model, x, t):
    """The model at the original timesteps: its prediction and variance values."""
    out = model(x, torch.tensor(d.timestep_map)[t])
    return out[:, : x.shape[1]], out[:, x.shape[1] :] if out.shape[1] > x.shape[1] else x


@pytest.mark.parametrize("respacing", RESPACINGS)
def test_noising_and_its_posterior(respacing):
    d, ref = process(respacing)
    t, x, x0, noise = batch(d)
    torch.testing.assert_close(
        d.q_sample(x0, t, noise=noise), rows(t, lambda t, x, n: ref.noised(x, t, n), x0, noise), **CLOSE
    )
    mean, variance, log_variance = d.q_mean_variance(x0, t)
    spread = rows(t, lambda t, x: (1 - ref.abar(t)) * torch.ones_like(x), x0)
    torch.testing.assert_close(mean, rows(t, lambda t, x: ref.noised(x, t, 0 * x), x0), **CLOSE)
    torch.testing.assert_close(variance.double(), spread, rtol=1e-3, atol=1e-7)  # 1 - abar in float32, at 1e-4
    torch.testing.assert_close(log_variance.double(), spread.log(), **CLOSE)

    mean, variance, log_variance = d.q_posterior_mean_variance(x0, x, t)
    torch.testing.assert_close(mean, rows(t, lambda t, x0, x: ref.posterior(x0, x, t)[0], x0, x), **CLOSE)
    torch.testing.assert_close(variance.double(), rows(t, lambda t, x: ref.posterior_variance(t) + 0 * x, x), **CLOSE)
    assert variance.shape == log_variance.shape == x.shape
    if d.num_timesteps > 1:
        torch.testing.assert_close(
            log_variance.double(), rows(t, lambda t, x: ref.log_variance("small", t) + 0 * x, x), **CLOSE
        )


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("mean", gd.ModelMeanType)
@pytest.mark.parametrize("variance", VARIANCES)
@pytest.mark.parametrize("respacing", ["", "250", "10,15,20"])
def test_p_mean_variance_and_ancestral_step(respacing, variance, mean, clip):
    d, ref = process(respacing, variance, mean)
    t, x, _, noise = batch(d)
    if mean is gd.ModelMeanType.PREVIOUS_X:
        t, x, noise = t[:2], x[:2], noise[:2]  # solving its mean for x_0 divides by coefficients near 0 at the end
    model = wavy if variance in ("range", "log") else wavy_mean
    prediction, values = reference_model(d, model, x, t)

    def x0(t, x, prediction):
        if mean is gd.ModelMeanType.EPSILON:
            x0 = ref.x0(x, t, prediction)
        elif mean is gd.ModelMeanType.START_X:
            x0 = prediction
        else:  # the x_0 whose posterior, linear in it, has this mean
            at_zero, at_one = (ref.posterior(torch.full_like(x, v), x, t)[0] for v in (0.0, 1.0))
            x0 = (prediction - at_zero) / (at_one - at_zero)
        return x0.clamp(-1, 1) if clip else x0

    expected_x0 = rows(t, x0, x, prediction)
    log_variance = rows(t, lambda t, v: ref.log_variance(variance, t, v) + 0 * v, values)
    expected_mean = rows(t, lambda t, x0, x: ref.posterior(x0, x, t)[0], expected_x0, x)
    if mean is gd.ModelMeanType.PREVIOUS_X:
        expected_mean = prediction
    tolerance = dict(rtol=3e-6, atol=3e-4) if mean is gd.ModelMeanType.PREVIOUS_X else CLOSE

    out = d.p_mean_variance(model, x, t, clip_denoised=clip)
    assert set(out) == {"mean", "variance", "log_variance", "pred_xstart", "extra"} and out["extra"] is None
    torch.testing.assert_close(out["pred_xstart"], expected_x0, **tolerance)
    torch.testing.assert_close(out["mean"], expected_mean, **tolerance)
    torch.testing.assert_close(out["log_variance"].double(), log_variance, **CLOSE)
    expected_variance = log_variance.exp()
    if variance == "small":
        expected_variance = rows(t, lambda t, x: ref.posterior_variance(t) + 0 * x, x)
    torch.testing.assert_close(out["variance"].double(), expected_variance, **CLOSE)

    for cond_fn in (None, slope):  # guidance moves the mean (Dhariwal, algorithm 1)
        step = d.p_sample(model, x, t, clip_denoised=clip, cond_fn=cond_fn, noise=noise)
        assert set(step) == {"sample", "pred_xstart"}
        if cond_fn:
            expected_mean = expected_mean + expected_variance * slope(x, torch.tensor(d.timestep_map)[t])
        last = (t == 0).view(-1, 1, 1, 1)
        expected = torch.where(last, expected_mean, expected_mean + (log_variance / 2).exp() * noise)
        torch.testing.assert_close(step["sample"], expected, **tolerance)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("respacing", RESPACINGS)
def test_ddim_step(respacing, eta, clip, guided):
    """Guidance is of the score (Dhariwal, algorithm 2)."""
    d, ref = process(respacing)
    t, x, _, noise = batch(d)
    prediction, _ = reference_model(d, wavy, x, t)
    x0 = rows(t, lambda t, x, e: ref.x0(x, t, e), x, prediction)
    x0 = x0.clamp(-1, 1) if clip else x0
    if guided:
        gradient = slope(x, torch.tensor(d.timestep_map)[t])
        x0 = rows(t, lambda t, x, x0, g: ref.x0(x, t, ref.guided_eps(x, t, x0, g)), x, x0, gradient)
    how = dict(clip_denoised=clip, cond_fn=slope if guided else None)
    out = d.ddim_sample(wavy, x, t, eta=eta, noise=noise, **how)
    torch.testing.assert_close(out["pred_xstart"], x0, **CLOSE)
    # 1 - abar of a float32 table has 4 digits left at t = 1, and sigma with it: so it is in every published picture.
    torch.testing.assert_close(
        out["sample"], rows(t, lambda t, x, x0, n: ref.ddim(x, t, x0, eta, n), x, x0, noise), rtol=1e-5, atol=5e-4
    )
    up = d.ddim_reverse_sample(wavy, x, t, **how)
    torch.testing.assert_close(
        up["sample"], rows(t, lambda t, x, x0: ref.ddim_up(x, t, x0), x, x0), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("sampler", ["p_sample", "ddim_sample"])
def test_float32_arithmetic_in_the_published_order(sampler):
    # Bit for bit: pictures of old seeds depend on it.
    d = create_diffusion("250")
    x, noise = torch.randn(2, 5, 4, 6, 6, generator=torch.Generator().manual_seed(2))
    t = torch.tensor([0, 1, 77, 180, 249])

    def table(values):
        return torch.from_numpy(values)[t].float().view(-1, 1, 1, 1)

    eps, v = wavy(x, torch.tensor(d.timestep_map)[t]).split(4, dim=1)
    x0 = table(d.sqrt_recip_alphas_cumprod) * x - table(d.sqrt_recipm1_alphas_cumprod) * eps
    mask = torch.tensor([0.0, 1, 1, 1, 1]).view(-1, 1, 1, 1)
    if sampler == "p_sample":
        mean = table(d.posterior_mean_coef1) * x0 + table(d.posterior_mean_coef2) * x
        frac = (v + 1) / 2
        log_variance = frac * table(torch.from_numpy(d.betas).log().numpy())
        log_variance = log_variance + (1 - frac) * table(d.posterior_log_variance_clipped)
        expected = mean + mask * torch.exp(0.5 * log_variance) * noise
        got = d.p_sample(wavy, x, t, clip_denoised=False, noise=noise)
    else:
        again = (table(d.sqrt_recip_alphas_cumprod) * x - x0) / table(d.sqrt_recipm1_alphas_cumprod)
        now, before = table(d.alphas_cumprod), table(d.alphas_cumprod_prev)
        sigma = 0.7 * torch.sqrt((1 - before) / (1 - now)) * torch.sqrt(1 - now / before)
        expected = x0 * torch.sqrt(before) + torch.sqrt(1 - before - sigma**2) * again + mask * sigma * noise
        got = d.ddim_sample(wavy, x, t, clip_denoised=False, eta=0.7, noise=noise)
    assert got["sample"].dtype == torch.float32
    assert torch.equal(got["pred_xstart"], x0)
    assert torch.equal(got["sample"], expected)


def test_denoised_fn_comes_before_the_clip():
    d, _ = process()
    t, x, _, _ = batch(d)
    free = d.p_mean_variance(wavy, x, t, clip_denoised=False)["pred_xstart"]
    out = d.p_mean_variance(wavy, x, t, clip_denoised=True, denoised_fn=lambda x0: 3 * x0 + 0.1)
    assert torch.equal(out["pred_xstart"], (3 * free + 0.1).clamp(-1, 1))
    for sample in (d.p_sample, d.ddim_sample, d.ddim_reverse_sample):
        assert torch.equal(sample(wavy, x, t, denoised_fn=lambda x0: 3 * x0 + 0.1)["pred_xstart"], out["pred_xstart"])


def test_model_sees_original_timesteps_once_and_kwargs():
    d, _ = process("10,15,20")
    t = torch.tensor([0, 20, 44])
    x = torch.randn(3, 2, 2, 2)
    seen = []

    def model(x, t, y, cfg_scale):
        seen.append((t.tolist(), y, cfg_scale))
        return wavy(x, t)

    def cond_fn(x, t, y, cfg_scale):
        seen.append((t.tolist(), y, cfg_scale))
        return 0 * x

    kwargs = dict(y="label", cfg_scale=4.0)
    original = [0, d.timestep_map[20], 999]
    d.p_sample(model, x, t, cond_fn=cond_fn, model_kwargs=kwargs)
    d.ddim_sample(d._wrap_model(model), x, t, cond_fn=cond_fn, model_kwargs=kwargs)  # wrapped once, not twice
    d.training_losses(model, x, t, kwargs)
    assert seen == [(original, "label", 4.0)] * 5


def test_extra_of_a_pair_and_shapes_that_do_not_fit():
    d, _ = process()
    t, x, _, _ = batch(d)
    assert d.p_mean_variance(lambda x, t: (wavy(x, t), "attention"), x, t)["extra"] == "attention"
    with pytest.raises(ValueError, match="6 channels"):
        d.p_mean_variance(wavy_mean, x, t)
    with pytest.raises(ValueError, match="3 channels"):
        process(variance="small")[0].training_losses(wavy, x, t)
    with pytest.raises(ValueError, match="6 channels"):
        d.training_losses(lambda x, t: wavy(x, t)[..., :2], x, t)
    with pytest.raises(ValueError, match="eta"):
        d.ddim_reverse_sample(wavy, x, t, eta=0.5)
    with pytest.raises(ValueError, match="one timestep per row"):
        d.p_mean_variance(wavy, x, t[:1])


def test_gaussian_densities():
    generator = torch.Generator().manual_seed(6)
    m1, v1, m2, v2 = torch.randn(4, 50, generator=generator, dtype=torch.float64)
    normal = torch.distributions.Normal
    for a, b, c, e in ((m1, v1, m2, v2), (m1, v1, 0.0, 0.0), (0.0, -1.0, m2, v2)):
        expected = torch.distributions.kl_divergence(
            normal(torch.as_tensor(a), torch.exp(torch.as_tensor(b) / 2)),
            normal(torch.as_tensor(c), torch.exp(torch.as_tensor(e) / 2)),
        )
        torch.testing.assert_close(diffusion_utils.normal_kl(a, b, c, e), expected.double(), rtol=1e-6, atol=1e-7)
    with pytest.raises(TypeError, match="tensor"):
        diffusion_utils.normal_kl(0.0, 0.0, 0.0, 0.0)

    x = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    assert (diffusion_utils.approx_standard_normal_cdf(x) - torch.special.ndtr(x)).abs().max() < 2e-4
    torch.testing.assert_close(
        diffusion_utils.continuous_gaussian_log_likelihood(m1, means=m2, log_scales=v1),
        normal(m2, v1.exp()).log_prob(m1),
    )

    levels = torch.arange(256, dtype=torch.float64) / 127.5 - 1
    for mean, sigma in ((0.1, 0.3), (-0.9, 0.2), (0.98, 0.05)):
        mean, sigma = torch.full_like(levels, mean), torch.full_like(levels, sigma)
        log_p = diffusion_utils.discretized_gaussian_log_likelihood(levels, means=mean, log_scales=sigma.log())
        assert log_p.exp().sum() == pytest.approx(1, abs=1e-9)  # 256 levels and nothing else
        torch.testing.assert_close(log_p.exp(), level_log_probability(levels, mean, sigma).exp(), rtol=0, atol=2e-3)
    assert (
        diffusion_utils.discretized_gaussian_log_likelihood(
            levels[:1], means=levels[-1:], log_scales=torch.full((1,), -5.0)
        )
        .isfinite()
        .all()
    )
    with pytest.raises(ValueError, match="one shape"):
        diffusion_utils.discretized_gaussian_log_likelihood(levels, means=mean[:1], log_scales=sigma)
