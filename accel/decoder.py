"""The decoder of the latent-diffusion autoencoder (Rombach et al. 2022, arXiv:2112.10752), the half of it that sampling needs.

It computes what diffusers' AutoencoderKL decodes, to the bit, from the same files. diffusers itself is not imported: that takes seconds,
more than four GPUs need for their part of a picture.
"""

import torch.nn as nn
import torch.nn.functional as F

EPS = 1e-6
# What config.json says of sd-vae-ft-ema and sd-vae-ft-mse.
SD_VAE_FT = dict(
    _class_name="AutoencoderKL",
    act_fn="silu",
    block_out_channels=[128, 256, 512, 512],
    layers_per_block=2,
    norm_num_groups=32,
    latent_channels=4,
    out_channels=3,
    up_block_types=["UpDecoderBlock2D"] * 4,
)


class Residual(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x)))))), the first x through a 1×1 convolution where the widths differ."""

    def __init__(self, width_in, width, groups):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, width_in, EPS), nn.Conv2d(width_in, width, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(groups, width, EPS), nn.Conv2d(width, width, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(width_in, width, 1) if width_in != width else None

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return (x if self.conv_shortcut is None else self.conv_shortcut(x)) + h


class Attention(nn.Module):
    """One head as wide as the layer, over all places."""

    def __init__(self, width, groups):
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, width, EPS)
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in "qkv")
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def forward(self, x):
        h = self.group_norm(x.flatten(2)).transpose(1, 2)  # (N, HW, C)
        q, k, v = (layer(h)[:, None] for layer in (self.to_q, self.to_k, self.to_v))  # each (N, 1, HW, C)
        h = self.to_out[0](F.scaled_dot_product_attention(q, k, v)[:, 0])
        return h.transpose(1, 2).reshape(x.shape) + x


class Middle(nn.Module):
    def __init__(self, width, groups, attention):
        super().__init__()
        self.resnets = nn.ModuleList([Residual(width, width, groups) for _ in range(2)])
        self.attentions = nn.ModuleList([Attention(width, groups)] if attention else [])

    def forward(self, x):
        x = self.resnets[0](x)
        for attention in self.attentions:
            x = attention(x)
        return self.resnets[1](x)


class Upsample(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Stage(nn.Module):
    def __init__(self, width_in, width, layers, groups, upsample):
        super().__init__()
        self.resnets = nn.ModuleList([Residual(width if i else width_in, width, groups) for i in range(layers)])
        self.upsamplers = nn.ModuleList([Upsample(width)] if upsample else [])

    def forward(self, x):
        for layer in (*self.resnets, *self.upsamplers):
            x = layer(x)
        return x


class _Network(nn.Module):
    def __init__(self, widths, layers, groups, latent_channels, out_channels, attention):
        super().__init__()
        widths = widths[::-1]
        self.conv_in = nn.Conv2d(latent_channels, widths[0], 3, padding=1)
        self.mid_block = Middle(widths[0], groups, attention)
        self.up_blocks = nn.ModuleList(
            [Stage(widths[max(i - 1, 0)], width, layers, groups, i + 1 < len(widths)) for i, width in enumerate(widths)]
        )
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], EPS)
        self.conv_out = nn.Conv2d(widths[-1], out_channels, 3, padding=1)

    def forward(self, x):
        x = self.mid_block(self.conv_in(x))
        for stage in self.up_blocks:
            x = stage(x)
        return self.conv_out(F.silu(self.conv_norm_out(x)))


# The attention's projections, as the published sd-vae-ft-* files still name them → as they are named since.
_OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


class Decoder(nn.Module):
    """Latents (N, 4, L, L), unscaled → pixels (N, 3, 8L, 8L). Its state-dict keys are AutoencoderKL's.

    config: an AutoencoderKL's config.json as a dict. Raises ValueError, naming the entry, for one that is not of the sd-vae-ft-* kind.
    """

    def __init__(self, config):
        super().__init__()
        widths = config["block_out_channels"]
        for name, value in dict(
            act_fn="silu", up_block_types=["UpDecoderBlock2D"] * len(widths), out_channels=3, latent_channels=4
        ).items():
            if config.get(name, value) != value:
                raise ValueError(f"{name} {config[name]}")
        self.post_quant_conv = nn.Conv2d(4, 4, 1) if config.get("use_post_quant_conv", True) else None
        self.decoder = _Network(
            widths,
            config.get("layers_per_block", 1) + 1,
            config.get("norm_num_groups", 32),
            4,
            3,
            config.get("mid_block_add_attention", True),
        )

    def forward(self, z):
        return self.decoder(z if self.post_quant_conv is None else self.post_quant_conv(z))

    def renamed(self, state):
        """The entries of an AutoencoderKL's state dict that this half needs, under today's names and in its shapes."""
        want, found = self.state_dict(), {}
        for name, tensor in state.items():
            parts = name.split(".")
            if "attentions" in parts and parts[-2] in _OLD_NAMES:
                parts[-2] = _OLD_NAMES[parts[-2]]
            name = ".".join(parts)
            if name in want:
                found[name] = tensor.reshape(want[name].shape) if tensor.numel() == want[name].numel() else tensor
        return found
