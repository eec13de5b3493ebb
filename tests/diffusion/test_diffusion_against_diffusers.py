"""
diffusers' schedulers, with what they do otherwise taken away: float32 cumulative products, timesteps at other places,
no clipped prediction in DDIM's direction.
"""

import pytest
import torch
from closed_forms import wavy
from diffusers import DDIMScheduler, DDPMScheduler

from diffusion import create_diffusion

SHAPE = (2, 4, 6, 6)


def in_float64(scheduler, d_trained):
    scheduler.alphas_cumprod = torch.from_numpy(d_trained.alphas_cumprod)
    scheduler.one = torch.ones((), dtype=torch.float64)
    return scheduler


def test_tables_agree_with_diffusers():
    linear = DDPMScheduler(beta_start=1e-4, beta_end=0.02, beta_schedule="linear")
    torch.testing.assert_close(
        torch.from_numpy(create_diffusion("").alphas_cumprod).float(), linear.alphas_cumprod, rtol=2e-5, atol=0
    )
    cosine = DDPMScheduler(beta_schedule="squaredcos_cap_v2")
    torch.testing.assert_close(
        torch.from_numpy(create_diffusion("", noise_schedule="squaredcos_cap_v2").betas).float(),
        cosine.betas,
        rtol=1e-5,
        atol=0,
    )


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(
    "variance, arguments",
    [
        ("learned_range", {}),
        ("fixed_small", dict(learn_sigma=False, sigma_small=True)),
        ("fixed_large", dict(learn_sigma=False)),
    ],
)
@pytest.mark.parametrize("respacing", ["250", "ddim25", "10,15,20"])
def test_ancestral_sampling_agrees_with_ddpm_scheduler(respacing, variance, arguments, clip):
    d = create_diffusion(respacing, **arguments)
    scheduler = in_float64(
        DDPMScheduler(beta_start=1e-4, beta_end=0.02, variance_type=variance, clip_sample=clip), create_diffusion("")
    )
    scheduler.set_timesteps(timesteps=d.timestep_map[::-1])  # its own spacing skips other steps
    learned = variance == "learned_range"
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=generator, dtype=torch.float64)

    def model(x, t):
        return wavy(x, t) if learned else wavy(x, t)[:, :4]

    ours = theirs = x
    noises = torch.Generator().manual_seed(1)
    for i, t in zip(reversed(range(d.num_timesteps)), scheduler.timesteps):
        state = noises.get_state()
        noise = torch.randn(SHAPE, generator=noises, dtype=torch.float64)
        ours = d.p_sample(model, ours, torch.full((2,), i), clip_denoised=clip, noise=noise)["sample"]
        noises.set_state(state)
        out = model(theirs, torch.full((2,), int(t)))
        theirs = scheduler.step(out, t, theirs, generator=noises).prev_sample
    scale = theirs.abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * scale)
    assert clip or scale > 1.5  # unclipped, the chain went somewhere


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("steps", [50, 20])
def test_ddim_agrees_with_ddim_scheduler(steps, eta, clip):
    d = create_diffusion(f"ddim{steps}", learn_sigma=False)
    scheduler = in_float64(
        DDIMScheduler(
            beta_start=1e-4, beta_end=0.02, clip_sample=clip, set_alpha_to_one=True, timestep_spacing="leading"
        ),
        create_diffusion(""),
    )
    scheduler.set_timesteps(steps)
    assert scheduler.timesteps.tolist() == d.timestep_map[::-1]
    generator = torch.Generator().manual_seed(0)
    ours = theirs = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    for i, t in zip(reversed(range(steps)), scheduler.timesteps):
        noise = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
        ours = d.ddim_sample(
            lambda x, t: wavy(x, t)[:, :4], ours, torch.full((2,), i), clip_denoised=clip, eta=eta, noise=noise
        )["sample"]
        out = wavy(theirs, torch.full((2,), int(t)))[:, :4]
        theirs = scheduler.step(
            out, t, theirs, eta=eta, use_clipped_model_output=clip, variance_noise=noise if eta else None
        ).prev_sample
    scale = theirs.abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4 * scale)


def test_noising_agrees_with_diffusers():
    d = create_diffusion("")
    scheduler = in_float64(DDPMScheduler(beta_start=1e-4, beta_end=0.02), d)
    x, noise = torch.randn(2, 5, 4, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    t = torch.tensor([0, 1, 250, 700, 999])
    torch.testing.assert_close(d.q_sample(x, t, noise=noise), scheduler.add_noise(x, noise, t), rtol=1e-6, atol=1e-6)
