"""diffusers' schedulers, with what they do otherwise taken away: float32 tables, timesteps at other places, no clipped
prediction in DDIM's direction."""

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler
from reference import wavy

from diffusion import create_diffusion

SHAPE = (2, 4, 6, 6)


def scheduler_of(kind, **how):
    scheduler = kind(beta_start=1e-4, beta_end=0.02, **how)
    scheduler.alphas_cumprod = torch.from_numpy(create_diffusion("").alphas_cumprod)
    scheduler.one = torch.ones((), dtype=torch.float64)
    return scheduler


def compare(d, scheduler, channels, ours, theirs):
    """Both chains over all steps. ours(model, x, i, noise) and theirs(out, t, x, noise) → the next x."""
    generator = torch.Generator().manual_seed(0)
    a = b = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    for i, t in zip(reversed(range(d.num_timesteps)), scheduler.timesteps):
        noise = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
        a = ours(lambda x, t: wavy(x, t)[:, :channels], a, torch.full((2,), i), noise)["sample"]
        b = theirs(wavy(b, torch.full((2,), int(t)))[:, :channels], t, b, noise).prev_sample
    scale = b.abs().max().item()
    torch.testing.assert_close(a, b, rtol=0, atol=2e-4 * scale)
    return scale


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(
    "variance, arguments",
    [
        ("learned_range", {}),
        ("fixed_small", dict(learn_sigma=False, sigma_small=True)),
        ("fixed_large", dict(learn_sigma=False)),
    ],
)
@pytest.mark.parametrize("respacing", ["250", "10,15,20"])
def test_ancestral_sampling_agrees_with_ddpm_scheduler(respacing, variance, arguments, clip, monkeypatch):
    d = create_diffusion(respacing, **arguments)
    scheduler = scheduler_of(DDPMScheduler, variance_type=variance, clip_sample=clip)
    scheduler.set_timesteps(timesteps=d.timestep_map[::-1])  # its own spacing skips other steps

    def theirs(out, t, x, noise):
        monkeypatch.setattr("diffusers.schedulers.scheduling_ddpm.randn_tensor", lambda *_, **how: noise)
        return scheduler.step(out, t, x)

    scale = compare(
        d,
        scheduler,
        8 if variance == "learned_range" else 4,
        lambda model, x, t, noise: d.p_sample(model, x, t, clip_denoised=clip, noise=noise),
        theirs,
    )
    assert clip or scale > 1.5  # unclipped, the chain went somewhere


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("steps", [50, 20])
def test_ddim_agrees_with_ddim_scheduler(steps, eta, clip):
    d = create_diffusion(f"ddim{steps}", learn_sigma=False)
    scheduler = scheduler_of(DDIMScheduler, clip_sample=clip, set_alpha_to_one=True, timestep_spacing="leading")
    scheduler.set_timesteps(steps)
    assert scheduler.timesteps.tolist() == d.timestep_map[::-1]
    how = dict(eta=eta, use_clipped_model_output=clip)
    compare(
        d,
        scheduler,
        4,
        lambda model, x, t, noise: d.ddim_sample(model, x, t, clip_denoised=clip, eta=eta, noise=noise),
        lambda out, t, x, noise: scheduler.step(out, t, x, variance_noise=noise if eta else None, **how),
    )
