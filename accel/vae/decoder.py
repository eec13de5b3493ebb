"""The decoder half of the latent-diffusion autoencoder (Rombach et al. 2022, arXiv:2112.10752), as sd-vae-ft-* has it.

It gives the same bits as diffusers' AutoencoderKL from the same files.
"""

# Our own, because `import diffusers` takes 2.6 to 8 s: longer than four GPUs need to sample.

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

EPS = 1e-6
LEVELS = 4  # of resolution: three upsamplings are the factor of 8 between latents and pixels
FIXED = {"act_fn": "silu", "latent_channels": 4, "out_channels": 3, "up_block_types": ["UpDecoderBlock2D"] * LEVELS}
FLAGS = ("use_post_quant_conv", "mid_block_add_attention")
# What AutoencoderKL takes for entries that a config.json lacks, and config.json of sd-vae-ft-ema and sd-vae-ft-mse.
DEFAULTS = {**FIXED, **dict.fromkeys(FLAGS, True), "norm_num_groups": 32, "layers_per_block": 1}
SD_VAE_FT = {
    **DEFAULTS,
    "_class_name": "AutoencoderKL",
    "layers_per_block": 2,
    "block_out_channels": [128, 256, 512, 512],
}


MOST_CHANNELS, MOST_LAYERS = 8192, 64  # far beyond any: a damaged config.json should not take minutes


def check_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with AutoencoderKL's defaults. Raises ValueError for an entry that no VAE like sd-vae-ft-* has."""

    def is_size(value, most=MOST_CHANNELS):
        return type(value) is int and 0 < value <= most

    entries = {"block_out_channels": None, **DEFAULTS, **config}
    widths = entries["block_out_channels"]
    valid = {name: entries[name] == value for name, value in FIXED.items()}
    valid |= {name: isinstance(entries[name], bool) for name in FLAGS}
    valid["norm_num_groups"] = is_size(entries["norm_num_groups"])
    valid["layers_per_block"] = is_size(entries["layers_per_block"], MOST_LAYERS)
    valid["block_out_channels"] = isinstance(widths, list) and len(widths) == LEVELS and all(map(is_size, widths))
    for name, is_valid in valid.items():
        if not is_valid:
            raise ValueError(f"{name} is {str(entries[name])[:80]}")
    return entries


class Residual(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x)))))), the first x through a 1×1 convolution where the widths differ."""

    def __init__(self, width_in: int, width: int, groups: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, width_in, EPS), nn.Conv2d(width_in, width, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(groups, width, EPS), nn.Conv2d(width, width, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(width_in, width, 1) if width_in != width else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return (x if self.conv_shortcut is None else self.conv_shortcut(x)) + h


class Attention(nn.Module):
    """Self-attention over all pixels of the latent, one head of the full width."""

    def __init__(self, width: int, groups: int):
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, width, EPS)
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in "qkv")
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.group_norm(x.flatten(2)).transpose(1, 2)  # (N, HW, C)
        q, k, v = (layer(h)[:, None] for layer in (self.to_q, self.to_k, self.to_v))  # each (N, 1, HW, C)
        h = self.to_out[0](F.scaled_dot_product_attention(q, k, v)[:, 0])
        return h.transpose(1, 2).reshape(x.shape) + x


class Upsample(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Block(nn.Module):
    """Residual layers; after the first an attention, in the middle of the network; at the end an upsampling, if any."""

    def __init__(self, width_in: int, width: int, layers: int, groups: int, attention: bool, upsample: bool):
        super().__init__()
        self.resnets = nn.ModuleList([Residual(width if i else width_in, width, groups) for i in range(layers)])
        self.attentions = nn.ModuleList([Attention(width, groups)] if attention else [])
        self.upsamplers = nn.ModuleList([Upsample(width)] if upsample else [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.resnets[0], *self.attentions, *self.resnets[1:], *self.upsamplers):
            x = layer(x)
        return x


class Layers(nn.Module):
    def __init__(self, widths: list[int], layers: int, groups: int, attention: bool):
        super().__init__()
        widths = widths[::-1]
        self.conv_in = nn.Conv2d(4, widths[0], 3, padding=1)
        self.mid_block = Block(widths[0], widths[0], 2, groups, attention, upsample=False)
        self.up_blocks = nn.ModuleList(
            Block(widths[max(i - 1, 0)], width, layers, groups, False, upsample=i + 1 < LEVELS)
            for i, width in enumerate(widths)
        )
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], EPS)
        self.conv_out = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv_in(x)
        for block in (self.mid_block, *self.up_blocks):
            x = block(x)
        return self.conv_out(F.silu(self.conv_norm_out(x)))


# The attention's projections, as the published sd-vae-ft-* files still name them → as they are named since.
_OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


class Decoder(nn.Module):
    """Latents (N, 4, L, L), unscaled → pixels (N, 3, 8L, 8L). Its state-dict keys are AutoencoderKL's.

    config: an AutoencoderKL's config.json as a dict. Raises ValueError as check_config does.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        config = check_config(config)
        self.post_quant_conv = nn.Conv2d(4, 4, 1) if config["use_post_quant_conv"] else None
        self.decoder = Layers(
            config["block_out_channels"],
            config["layers_per_block"] + 1,
            config["norm_num_groups"],
            config["mid_block_add_attention"],
        )

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.decoder(z if self.post_quant_conv is None else self.post_quant_conv(z))

    def renamed(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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
