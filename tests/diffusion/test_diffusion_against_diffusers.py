"""diffusers' schedulers, with what they do otherwise taken away: float32 tables, timesteps at other places, no clipped
prediction in DDIM's direction."""

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler
from reference import wavy

from diffusion import create_diffusion

SHAPE = (2, 4, 6, 6)


def compare(d, scheduler, channels, ours, theirs):
    """Both chains over all steps. ours(model, x, i, noise) and theirs(out, t, x, noise) → the next x."""
    scheduler.alphas_cumprod = torch.from_numpy(create_diffusion("").alphas_cumprod)
    scheduler.one = torch.ones((), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    a = b = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    for i, t in zip(reversed(range(d.num_timesteps)), scheduler.timesteps, strict=True):
        noise = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
        a = ours(lambda x, t: wavy(x, t)[:, :channels], a, torch.full((2,), i), noise=noise)["sample"]
        b = theirs(wavy(b, torch.full((2,), int(t)))[:, :channels], t, b, noise).prev_sample
    torch.testing.assert_close(a, b, rtol=0, atol=2e-4 * b.abs().max().item())


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("variance", ["learned_range", "fixed_small", "fixed_large"])
@pytest.mark.parametrize("respacing", ["100", "10,15,20"])
def test_ancestral_sampling_agrees_with_ddpm_scheduler(respacing, variance, clip, monkeypatch):
    learned = variance == "learned_range"
    d = create_diffusion(respacing, learn_sigma=learned, sigma_small=variance == "fixed_small")
    scheduler = DDPMScheduler(beta_start=1e-4, beta_end=0.02, variance_type=variance, clip_sample=clip)
    scheduler.set_timesteps(timesteps=d.timestep_map[::-1])  # its own spacing skips other steps

    def theirs(out, t, x, noise):
        monkeypatch.setattr("diffusers.schedulers.scheduling_ddpm.randn_tensor", lambda *_, **how: noise)
        return scheduler.step(out, t, x)

    def ours(*arguments, noise):
        return d.p_sample(*arguments, clip_denoised=clip, noise=noise)

    compare(d, scheduler, 8 if learned else 4, ours, theirs)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ddim_agrees_with_ddim_scheduler(eta, clip):
    d, how = create_diffusion("ddim50", learn_sigma=False), dict(eta=eta, use_clipped_model_output=clip)
    scheduler = DDIMScheduler(beta_start=1e-4, beta_end=0.02, clip_sample=clip)
    scheduler.set_timesteps(50)

    def theirs(out, t, x, noise):
        return scheduler.step(out, t, x, variance_noise=noise if eta else None, **how)

    def ours(*arguments, noise):
        return d.ddim_sample(*arguments, clip_denoised=clip, eta=eta, noise=noise)

    compare(d, scheduler, 4, ours, theirs)
