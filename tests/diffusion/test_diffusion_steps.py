"""Steps, losses and the bound against the reference, in float64."""

import numpy as np
import pytest
import torch
from reference import batch, linear_betas, process, slope, wavy

from diffusion import create_diffusion, diffusion_utils, respace
from diffusion import gaussian_diffusion as gd
from diffusion.respace import SpacedDiffusion
from diffusion.timestep_sampler import LossSecondMomentResampler, create_named_schedule_sampler

# Tables are float32: at the noisy end x_0 = 157 x_t - 157 eps magnifies their last bit.
CLOSE = dict(rtol=3e-6, atol=3e-5)
MEANS, VARIANCES, LOSSES = (
    pytest.mark.parametrize(name, [kind.name for kind in kinds])
    for name, kinds in (
        ("mean", gd.ModelMeanType),
        ("variance", gd.ModelVarType),
        ("loss", gd.LossType),
    )
)


def close(got, want, **how):
    torch.testing.assert_close(got.double(), want.expand(got.shape), **{**CLOSE, **how})


def outputs(d, variance, x, t, y=0.3):
    """A model, its prediction at the original timesteps, and its variance values (None
    where it has none).
    """
    out = wavy(x, torch.tensor(d.timestep_map)[t], y)
    if variance.startswith("LEARNED"):
        return wavy, *out.chunk(2, 1)
    return lambda x, t, y: wavy(x, t, y)[:, :3], out[:, :3], None


@pytest.mark.parametrize("respacing", ["", "10,15,20", "1"])
def test_noising_and_its_posterior(respacing):
    d, ref = process(respacing)
    t, x, x0, noise = batch(d)
    close(d.q_sample(x0, t, noise=noise), ref.noised(x0, t, noise))
    mean, variance, log_variance = d.q_mean_variance(x0, t)
    close(mean, ref.noised(x0, t, 0))
    close(variance, 1 - ref.abar(t), atol=0)
    close(log_variance, (1 - ref.abar(t)).log())
    mean, variance, log_variance = d.q_posterior_mean_variance(x0, x, t)
    want, spread = ref.posterior(x0, x, t)
    close(mean, want)
    close(variance, spread)
    close(log_variance, ref.log_variance("FIXED_SMALL", t))
    assert {one.shape for one in (*d.q_mean_variance(x0, t), mean, variance, log_variance)} == {
        x.shape
    }


@pytest.mark.parametrize("clip", [True, False])
@MEANS
@VARIANCES
def test_p_mean_variance_and_ancestral_step(variance, mean, clip):
    d, ref = process("10,15,20", variance, mean)
    t, x, _, noise = batch(d)
    x = x.contiguous(memory_format=torch.channels_last)  # the model's output has this order, too
    how = {}
    given = dict(clip_denoised=clip, model_kwargs=dict(y=0.7))
    if mean == "PREVIOUS_X":
        how = dict(atol=3e-4)
        t = t[:2]
        x = x[:2]
        noise = noise[:2]  # solving its mean for x_0 divides by coefficients near 0 at the end
    model, prediction, values = outputs(d, variance, x, t, 0.7)
    x0 = ref.x0(x, t, prediction, mean)
    log_variance = ref.log_variance(variance, t, values)
    x0 = x0.clamp(-1, 1) if clip else x0
    want, small = ref.posterior(x0, x, t)
    want = prediction if mean == "PREVIOUS_X" else want
    spread = small if variance == "FIXED_SMALL" else log_variance.exp()
    out = d.p_mean_variance(model, x, t, **given)
    assert out.pop("extra") is None and {one.shape for one in out.values()} == {x.shape}
    assert set(out) == {"mean", "variance", "log_variance", "pred_xstart"}
    close(out["pred_xstart"], x0, **how)
    close(out["mean"], want, **how)
    assert out["mean"].is_contiguous() == (mean != "PREVIOUS_X")
    close(out["log_variance"], log_variance)
    close(out["variance"], spread)
    moved = (t > 0).view(-1, 1, 1, 1) * (log_variance / 2).exp() * noise
    close(d.p_sample(model, x, t, noise=noise, **given)["sample"], want + moved, **how)
    # guidance of the mean: Dhariwal, algorithm 1
    want = want + spread * slope(x, torch.tensor(d.timestep_map)[t], 0.7)
    close(
        d.p_sample(model, x, t, cond_fn=slope, noise=noise, **given)["sample"], want + moved, **how
    )


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("respacing", ["", "ddim50", "2", "1"])
def test_ddim_step(respacing, clip, guided):
    """Guidance is of the score (Dhariwal, algorithm 2)."""
    d, ref = process(respacing)
    t, x, _, noise = batch(d)
    _, prediction, _ = outputs(d, "LEARNED_RANGE", x, t, 0.7)
    x0 = ref.x0(x, t, prediction)
    x0 = x0.clamp(-1, 1) if clip else x0
    if guided:
        gradient = slope(x, torch.tensor(d.timestep_map)[t], 0.7)
        x0 = ref.x0(x, t, ref.eps(x, t, x0) - (1 - ref.abar(t)).sqrt() * gradient)
    given = dict(clip_denoised=clip, cond_fn=slope if guided else None, model_kwargs=dict(y=0.7))
    for eta in (0.0, 0.5, 1.0):
        out = d.ddim_sample(wavy, x, t, eta=eta, noise=noise, **given)
        close(out["pred_xstart"], x0)
        # In float32 1 - abar has 4 digits left at t = 1, and so has sigma: so it is in
        # every published picture.
        close(out["sample"], ref.ddim(x, t, x0, eta, noise), rtol=1e-5, atol=5e-4)
    up = d.ddim_reverse_sample(wavy, x, t, **given)
    close(up["sample"], ref.ddim_up(x, t, x0), rtol=1e-5, atol=1e-4)


def test_denoised_fn_comes_before_the_clip():
    d, _ = process()
    t, x, _, _ = batch(d)
    free = d.p_mean_variance(wavy, x, t, clip_denoised=False)["pred_xstart"]
    for sample in (d.p_sample, d.ddim_sample, d.ddim_reverse_sample):
        got = sample(wavy, x, t, denoised_fn=lambda x0: 3 * x0 + 0.1)["pred_xstart"]
        assert torch.equal(got, (3 * free + 0.1).clamp(-1, 1))


def test_extra_of_a_pair_and_shapes_that_do_not_fit():
    d, _ = process()
    t, x, _, _ = batch(d)
    assert d.p_mean_variance(lambda x, t: (wavy(x, t), "attention"), x, t)["extra"] == "attention"
    for call, words in (
        (lambda: d.p_mean_variance(lambda x, t: x, x, t), "6 channels"),
        (lambda: process(variance="FIXED_SMALL")[0].training_losses(wavy, x, t), "3 channels"),
        (lambda: d.training_losses(lambda x, t: wavy(x, t)[..., :2], x, t), "6 channels"),
        (lambda: d.ddim_reverse_sample(wavy, x, t, eta=0.5), "eta"),
        (lambda: d.p_mean_variance(wavy, x, t[:1]), "one timestep per row"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_likelihoods():
    levels = torch.arange(256, dtype=torch.float64) / 127.5 - 1
    mean = torch.full_like(levels, 0.1)
    scale = torch.full_like(levels, -1.2)
    log_p = diffusion_utils.discretized_gaussian_log_likelihood(
        levels, means=mean, log_scales=scale
    )
    assert log_p.exp().sum() == pytest.approx(1, abs=1e-9)  # 256 levels and nothing else
    far = diffusion_utils.discretized_gaussian_log_likelihood(
        levels[:1], means=levels[-1:], log_scales=scale[:1] - 4
    )
    assert far.isfinite().all()
    got = diffusion_utils.continuous_gaussian_log_likelihood(levels, means=mean, log_scales=scale)
    close(got, torch.distributions.Normal(mean, scale.exp()).log_prob(levels), rtol=1e-9, atol=0)


@MEANS
@VARIANCES
@LOSSES
def test_training_losses(loss, variance, mean):
    """On a model that misses its target by little: no log probability is lost in the far tails."""
    d, ref = process("100", variance, mean, loss)
    t, _, x0, noise = batch(d)
    xt = ref.noised(x0, t, noise)
    target = dict(EPSILON=noise, START_X=x0, PREVIOUS_X=ref.posterior(x0, xt, t)[0])[mean]
    _, off, values = outputs(d, variance, xt, t)
    prediction = target + (0.1 if mean == "EPSILON" else 0.003) * off
    out = prediction if values is None else torch.cat([prediction, values], 1)
    at = (
        prediction
        if mean == "PREVIOUS_X"
        else ref.posterior(ref.x0(xt, t, prediction, mean), xt, t)[0]
    )
    want = ref.bound(x0, xt, t, at, ref.log_variance(variance, t, values))
    terms = d.training_losses(lambda *_: out, x0, t, noise=noise)

    def check_bound(got, scale):
        close(got[1:], scale * want[1:], rtol=1e-3, atol=2e-6 * scale)
        assert got[0] == pytest.approx(scale * want[0].item(), rel=0.02)  # tanh for erf

    if "KL" in loss:
        assert set(terms) == {"loss"}
        return check_bound(terms["loss"], 100 if loss == "RESCALED_KL" else 1)
    close(terms["mse"], ((target - prediction) ** 2).mean((1, 2, 3)), rtol=1e-4, atol=1e-6)
    assert set(terms) == ({"mse", "loss"} if values is None else {"mse", "vb", "loss"})
    if values is not None:
        check_bound(terms["vb"], 100 / 1000 if loss == "RESCALED_MSE" else 1)
    assert torch.equal(terms["loss"], terms["mse"] + terms.get("vb", 0))


def test_each_term_trains_its_own_half_of_the_output():
    """And nothing else (Nichol, section 3.1)."""
    d, _ = process("")
    t, _, x0, noise = batch(d)
    halves = (
        (noise + 0.05 * torch.sin(7 * x0)).requires_grad_(),
        (0.8 * torch.cos(5 * x0)).requires_grad_(),
    )
    terms = d.training_losses(lambda x, t: torch.cat(halves, 1), x0, t, noise=noise)
    for name, own in (("mse", 0), ("vb", 1)):
        gradients = torch.autograd.grad(terms[name].sum(), halves, retain_graph=True)
        assert gradients[own].abs().max() > 1e-6 and not gradients[1 - own].any()


def test_bits_per_dimension():
    """The bound's terms are those of training, at every timestep."""
    d, ref = process("40", loss="KL")
    _, _, x0, _ = batch(d)
    torch.manual_seed(11)
    out = d.calc_bpd_loop(wavy, x0, clip_denoised=False)
    assert set(out) == {"total_bpd", "prior_bpd", "vb", "xstart_mse", "mse"}
    torch.manual_seed(11)
    for column, t in enumerate(torch.arange(39, -1, -1)[:, None].repeat(1, 4)):
        noise = torch.randn_like(x0)
        xt = d.q_sample(x0, t, noise)
        eps = wavy(xt, d.original_timesteps(t))[:, :3]
        x = d.p_mean_variance(wavy, xt, t, False)["pred_xstart"]
        assert torch.equal(
            out["vb"][:, column], d.training_losses(wavy, x0, t, noise=noise)["loss"]
        )
        close(out["xstart_mse"][:, column], ((x - x0) ** 2).mean((1, 2, 3)))
        close(out["mse"][:, column], ((eps - noise) ** 2).mean((1, 2, 3)), rtol=2e-3)
    close(out["prior_bpd"], ref.prior_bound(x0), rtol=1e-3, atol=1e-7)
    assert torch.equal(out["total_bpd"], out["vb"].sum(1) + out["prior_bpd"])


def test_timesteps_to_train_on():
    np.random.seed(0)
    t, weights = create_named_schedule_sampler("uniform", create_diffusion("20")).sample(
        20_000, "cpu"
    )
    assert t.dtype == torch.int64 and torch.equal(weights, torch.ones(20_000))
    assert (torch.bincount(t, minlength=20) - 1000).abs().max() < 150
    by_loss = create_named_schedule_sampler("loss-second-moment", create_diffusion("20"))
    assert isinstance(by_loss, LossSecondMomentResampler)
    with pytest.raises(ValueError, match="importance"):
        create_named_schedule_sampler("importance", create_diffusion("20"))
    sampler = LossSecondMomentResampler(create_diffusion("4"), history_per_term=2, uniform_prob=0.1)
    sampler.update_with_local_losses(
        torch.tensor([0, 0, 1, 1, 2, 2, 3]), torch.tensor([9.0, 1, 2, 2, 0, 0, 1])
    )
    assert (sampler.weights() == 1).all()  # t = 3 still lacks one
    # 9 leaves the history of t = 0
    sampler.update_with_local_losses(torch.tensor([3, 0]), torch.tensor([7.0, 3]))
    root = np.array([5.0, 4.0, 0.0, 25.0]) ** 0.5
    np.testing.assert_allclose(sampler.weights(), 0.9 * root / root.sum() + 0.1 / 4)
    t, weights = sampler.sample(100_000, "cpu")
    loss = torch.tensor([1.0, -2.0, 0.5, 3.0])
    # weighted: the uniform mean
    assert (loss[t] * weights).mean() == pytest.approx(loss.mean().item(), abs=0.03)
    assert torch.bincount(t, minlength=4).numpy() / 1e5 == pytest.approx(
        sampler.weights(), abs=0.01
    )


class Own(SpacedDiffusion):
    """A subclass that overrides what upstream's code calls; it takes names as upstream gives
    them.
    """

    def p_mean_variance(self, model, x, t, **named):
        return super().p_mean_variance(model, x, t, **named)

    def _vb_terms_bpd(self, model, x_start, x_t, t, **named):
        terms = super()._vb_terms_bpd(model, x_start, x_t, t, **named)
        assert terms["pred_xstart"].shape == x_start.shape
        return {**terms, "output": 2 * terms["output"]}


def own_process():
    d = process("5")[0]
    kinds = {name: getattr(d, name) for name in ("model_mean_type", "model_var_type", "loss_type")}
    return Own(use_timesteps=d.use_timesteps, betas=linear_betas(1000).numpy(), **kinds), d


def test_a_subclass_changes_the_result_where_it_says_so():
    own, usual = own_process()
    t, x, x0, noise = batch(usual)
    want = usual.training_losses(wavy, x0, t, noise=noise)
    got = own.training_losses(wavy, x0, t, noise=noise)
    assert torch.equal(got["vb"], 2 * want["vb"]) and torch.equal(got["mse"], want["mse"])
    terms = usual._vb_terms_bpd(wavy, x0, x, t, clip_denoised=False)
    x_start = usual.p_mean_variance(wavy, x, t, clip_denoised=False)["pred_xstart"]
    assert torch.equal(terms["pred_xstart"], x_start)
    wrapped = respace._WrappedModel(lambda x, ts: ts, usual.timestep_map, 1000)
    assert torch.equal(wrapped(x, t), usual.original_timesteps(t))
    own._scale_timesteps = lambda t: 0 * t  # as the first step's: the model sees its timestep
    first = usual.p_mean_variance(lambda x, _: wavy(x, 0 * t), x, t)
    assert torch.equal(own.p_mean_variance(wavy, x, t)["mean"], first["mean"])
