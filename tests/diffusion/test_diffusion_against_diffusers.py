"""diffusers' schedulers over all steps, without their differences: float32 tables, other
timesteps, no clipped prediction in DDIM's direction.
"""

from functools import partial

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler
from reference import wavy

from diffusion import create_diffusion


def compare(d, scheduler, ours, theirs, channels=4):
    """ours(model, x, i, noise=…) and theirs(out, t, x, noise) make a step from x at t."""
    scheduler.alphas_cumprod = torch.from_numpy(create_diffusion("").alphas_cumprod)
    scheduler.one = torch.ones((), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    x, *noises = torch.randn(
        1 + d.num_timesteps, 2, 4, 6, 6, generator=generator, dtype=torch.float64
    )
    other = x
    for i, t, noise in zip(
        reversed(range(d.num_timesteps)), scheduler.timesteps, noises, strict=True
    ):
        x = ours(lambda x, t: wavy(x, t)[:, :channels], x, torch.full((2,), i), noise=noise)[
            "sample"
        ]
        other = theirs(
            wavy(other, torch.full((2,), int(t)))[:, :channels], t, other, noise
        ).prev_sample
    torch.testing.assert_close(x, other, rtol=0, atol=2e-4 * other.abs().max().item())


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("variance", ["learned_range", "fixed_small", "fixed_large"])
@pytest.mark.parametrize("respacing", ["100", "10,15,20"])
def test_ancestral_sampling_agrees_with_ddpm_scheduler(respacing, variance, clip, monkeypatch):
    learned = variance == "learned_range"
    d = create_diffusion(respacing, learn_sigma=learned, sigma_small=variance == "fixed_small")
    scheduler = DDPMScheduler(
        beta_start=1e-4, beta_end=0.02, variance_type=variance, clip_sample=clip
    )
    scheduler.set_timesteps(timesteps=d.timestep_map[::-1])  # its own spacing skips other steps

    def theirs(out, t, x, noise):
        monkeypatch.setattr(
            "diffusers.schedulers.scheduling_ddpm.randn_tensor", lambda *_, **how: noise
        )
        return scheduler.step(out, t, x)

    compare(d, scheduler, partial(d.p_sample, clip_denoised=clip), theirs, 8 if learned else 4)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ddim_agrees_with_ddim_scheduler(eta, clip):
    d = create_diffusion("ddim50", learn_sigma=False)
    scheduler = DDIMScheduler(beta_start=1e-4, beta_end=0.02, clip_sample=clip)
    scheduler.set_timesteps(50)

    def theirs(out, t, x, noise):
        how = dict(eta=eta, use_clipped_model_output=clip, variance_noise=noise if eta else None)
        return scheduler.step(out, t, x, **how)

    compare(d, scheduler, partial(d.ddim_sample, clip_denoised=clip, eta=eta), theirs)
