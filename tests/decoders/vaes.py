"""diffusers' AutoencoderKL with random weights, and the pixels that its pipelines make."""

import torch


def levels(*widths, **more):
    n = len(widths)
    kinds = dict(
        up_block_types=["UpDecoderBlock2D"] * n, down_block_types=["DownEncoderBlock2D"] * n
    )
    return dict(block_out_channels=list(widths), **kinds, **more)


STATISTICS = dict(latents_mean=[0.1, -0.5, 0.0, 2.0], latents_std=[0.5, 1.0, 2.0, 4.5])
SCALES = {
    "another factor": dict(scaling_factor=0.13025),
    "a shift": dict(scaling_factor=1.5305, shift_factor=0.0609),
    "a negative shift": dict(shift_factor=-0.5),
    "statistics": dict(scaling_factor=0.5, **STATISTICS),
}


def by_pipelines(vae, latents):
    """Pixels by diffusers' AutoencoderKL, of latents scaled as Stable Diffusion's
    pipelines do: XL's with statistics, 3's with a shift, the first with a factor alone.
    """
    config = vae.config
    if config.latents_mean is not None:
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1)
            for values in (config.latents_mean, config.latents_std)
        )
        latents = latents * std / config.scaling_factor + mean
    else:
        latents = latents / config.scaling_factor + (config.shift_factor or 0)
    with torch.inference_mode():
        return torch.cat([vae.decode(one).sample for one in latents.split(1)])


def random_vae(folder, change):
    """diffusers' AutoencoderKL like the one in `folder` but for `change`, with random weights."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_config({**AutoencoderKL.load_config(folder), **change}).eval()
    with torch.no_grad():
        for value in vae.parameters():
            value.add_(0.1 * torch.randn_like(value))  # its norms start as the identity
    return vae
