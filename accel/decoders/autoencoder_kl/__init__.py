"""The decoder of AutoencoderKL (Rombach et al. 2022, arXiv:2112.10752).

Its output is bit-identical to diffusers'. Any widths, numbers of levels and latent channels are
supported; other block types are refused. half.py is the float16 version.
"""

# Not imported from diffusers: `import diffusers` takes 2.6 to 8 s, longer than four GPUs sample.

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from accel.decoders import DecoderFiles, DecoderKind, LatentSpace
from accel.errors import InputRef, UsageError, shown
from accel.tensors.shapes import require_fit, shapes_only
from accel.tensors.tensor_files import floats_of, read_tensors, weight_files

EPS = 1e-6
STATISTICS = ("latents_mean", "latents_std")
# block type → whether attention follows each layer
UP_BLOCKS = {"UpDecoderBlock2D": False, "AttnUpDecoderBlock2D": True}
VAE_LATENT_ENTRIES = ("scaling_factor", "shift_factor", *STATISTICS)
FLAGS = ("use_post_quant_conv", "mid_block_add_attention")
# Defaults of AutoencoderKL's constructor that affect the decoder, and the config of sd-vae-ft-*.
DEFAULTS = {
    "act_fn": "silu",
    "block_out_channels": [64],
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 32,
    "out_channels": 3,
    "scaling_factor": 0.18215,
    "shift_factor": None,
    "up_block_types": ["UpDecoderBlock2D"],
    **dict.fromkeys(STATISTICS),
    **dict.fromkeys(FLAGS, True),
}
SD_VAE_FT = {
    **DEFAULTS,
    "_class_name": "AutoencoderKL",
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
}
MAX_MAGNITUDE = 1e6  # of scales and shifts, far above plausible values


def check_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of config.json that affect the decoder, with AutoencoderKL's defaults.
    Raises ValueError for an entry that is invalid or not supported.
    """

    # the bound keeps a corrupt config.json from building a huge module
    def is_size(value, most=8192):
        return type(value) is int and 0 < value <= most

    def is_number(value, least=-MAX_MAGNITUDE):
        return type(value) in (int, float) and least <= value <= MAX_MAGNITUDE  # false for NaN

    def is_list(values, length, check, *bounds):
        is_complete = isinstance(values, list) and len(values) == length
        return is_complete and all(check(value, *bounds) for value in values)

    entries = {name: config.get(name, value) for name, value in DEFAULTS.items()}
    widths, shift, mean, std = (
        entries[name] for name in ("block_out_channels", "shift_factor", *STATISTICS)
    )
    levels = len(widths) if isinstance(widths, list) else 0
    channels = entries["latent_channels"]
    no_statistics = mean is None and std is None
    valid = {name: isinstance(entries[name], bool) for name in FLAGS} | {
        "act_fn": entries["act_fn"] == "silu",
        "out_channels": entries["out_channels"] == 3,
        "latent_channels": is_size(channels),
        "norm_num_groups": is_size(entries["norm_num_groups"]),
        "layers_per_block": is_size(entries["layers_per_block"], most=64),
        "block_out_channels": 0 < levels <= 8 and all(map(is_size, widths)),
        "up_block_types": is_list(entries["up_block_types"], levels, list(UP_BLOCKS).__contains__),
        "scaling_factor": is_number(entries["scaling_factor"], 1 / MAX_MAGNITUDE),
        "shift_factor": shift is None or is_number(shift) and (no_statistics or shift == 0),
        "latents_mean": no_statistics or is_list(mean, channels, is_number),
        "latents_std": no_statistics or is_list(std, channels, is_number, 1 / MAX_MAGNITUDE),
    }
    for name, is_valid in valid.items():
        if not is_valid:
            raise ValueError(f"{name} is {shown(entries[name])}")
    return entries


class Residual(nn.Module):
    """shortcut(x) + conv(silu(norm(conv(silu(norm(x)))))); the shortcut is a 1×1 convolution if
    the widths differ, else the identity.
    """

    def __init__(self, width_in: int, width: int, groups: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, width_in, EPS)
        self.conv1 = nn.Conv2d(width_in, width, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, width, EPS)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(width_in, width, 1) if width_in != width else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return (x if self.conv_shortcut is None else self.conv_shortcut(x)) + h


class Attention(nn.Module):
    """Single-head self-attention over all positions of the feature map."""

    def __init__(self, width: int, groups: int):
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, width, EPS)
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in "qkv")
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.group_norm(x.flatten(2)).transpose(1, 2)  # (N, HW, C)
        # each (N, 1, HW, C)
        q, k, v = (layer(h)[:, None] for layer in (self.to_q, self.to_k, self.to_v))
        h = self.to_out[0](F.scaled_dot_product_attention(q, k, v)[:, 0])
        return h.transpose(1, 2).reshape(x.shape) + x


class Block(nn.Module):
    """Residual layers, the first `attentions` of them followed by attention, then optionally
    nearest upsampling by 2 with a 3×3 convolution.
    """

    def __init__(
        self, width_in: int, width: int, layers: int, groups: int, attentions: int, upsample: bool
    ):
        super().__init__()
        self.resnets = nn.ModuleList(
            [Residual(width if i else width_in, width, groups) for i in range(layers)]
        )
        self.attentions = nn.ModuleList([Attention(width, groups) for _ in range(attentions)])
        pairs = zip_longest(self.resnets, self.attentions)
        self.layers = [layer for layer in chain(*pairs) if layer is not None]  # in order
        self.upsamplers = nn.ModuleList()
        if upsample:
            conv = nn.Conv2d(width, width, 3, padding=1)
            nearest = nn.Upsample(scale_factor=2.0)
            self.upsamplers.append(nn.Sequential(OrderedDict(nearest=nearest, conv=conv)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, *self.upsamplers):
            x = layer(x)
        return x


class Layers(nn.Module):
    """conv_in, mid_block, up_blocks and the output layers, under diffusers' names."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        widths = config["block_out_channels"][::-1]
        layers = config["layers_per_block"] + 1
        groups = config["norm_num_groups"]
        self.conv_in = nn.Conv2d(config["latent_channels"], widths[0], 3, padding=1)
        self.mid_block = Block(
            widths[0], widths[0], 2, groups, config["mid_block_add_attention"], upsample=False
        )
        self.up_blocks = nn.ModuleList(
            Block(
                widths[max(i - 1, 0)],
                width,
                layers,
                groups,
                layers * UP_BLOCKS[block_type],
                upsample=i + 1 < len(widths),
            )
            for i, (width, block_type) in enumerate(zip(widths, config["up_block_types"]))
        )
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], EPS)
        self.conv_out = nn.Conv2d(widths[-1], 3, 3, padding=1)


# Attention layers in the published sd-vae-ft-* files → current names in diffusers.
_OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


class KLDecoder(nn.Module):
    """Decode (N, C, L, L) → pixels (N, 3, H, W), with AutoencoderKL's state-dict keys.

    config: content of AutoencoderKL's config.json. Raises ValueError as `check_config`.
    """

    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        self.entries = check_config(config)
        channels = self.entries["latent_channels"]
        self.post_quant_conv = (
            nn.Conv2d(channels, channels, 1) if self.entries["use_post_quant_conv"] else None
        )
        self.decoder = Layers(self.entries)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        layers = self.decoder
        x = layers.conv_in(z if self.post_quant_conv is None else self.post_quant_conv(z))
        for block in (layers.mid_block, *layers.up_blocks):
            x = block(x)
        return layers.conv_out(F.silu(layers.conv_norm_out(x)))


class AutoencoderKL(DecoderKind):
    """AutoencoderKL in diffusers' folder layout."""

    def matches(self, content: Mapping[str, Any]) -> bool:
        """Whether config.json names the class."""
        return content.get("_class_name") == "AutoencoderKL"

    def files(self, path: Path, statistics: str | None) -> list[Path]:
        """Return config.json and the weights. Statistics belong to the latent space."""
        return [path / "config.json", *weight_files(path, "vae")]

    def read(
        self, files: DecoderFiles, content: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the checked config.json and the decoder's weights."""
        config, *weights = self.files(files.path, files.statistics)
        state: dict[str, torch.Tensor] = {}
        for file in weights:
            state |= read_tensors(file, "vae")
        return self.checked(config, content, weights[-1], state)

    def checked(
        self,
        config_file: Path,
        config: Mapping[str, Any],
        weight_file: Path,
        state: dict[str, torch.Tensor],
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Check config and weights, and return the entries that affect the decoder and its tensors,
        with current names and shapes. Raises UsageError.
        """
        try:
            with shapes_only():
                decoder = KLDecoder(config)
        except ValueError as error:
            raise UsageError(
                f"{error}, which is not supported",
                "give another AutoencoderKL",
                parameter="vae",
                value=config_file,
            ) from None
        given = InputRef(str(weight_file), "vae")
        want = decoder.state_dict()
        needed = {}
        for name, tensor in floats_of(state, given).items():
            name = ".".join([_OLD_NAMES.get(part, part) for part in name.split(".")])
            if name in want:
                shape = want[name].shape
                needed[name] = tensor.reshape(shape) if tensor.numel() == shape.numel() else tensor
        require_fit(given, needed, decoder)
        return decoder.entries, needed

    def space(self, files: DecoderFiles, entries: dict[str, Any]) -> LatentSpace:
        """Return the latent space, with the statistics of --latent-stats if given."""
        space = LatentSpace(
            channels=entries["latent_channels"],
            factor=2 ** (len(entries["block_out_channels"]) - 1),
            scale=entries["scaling_factor"],
            shift=entries["shift_factor"] or 0.0,
            mean=tuple(entries["latents_mean"] or ()),
            std=tuple(entries["latents_std"] or ()),
            decoder=files,
        )
        if not files.statistics:
            return space
        from accel.decoders.statistics import with_statistics  # lazy: only for --latent-stats

        return with_statistics(space, files.statistics)

    def build(self, entries: dict[str, Any]) -> KLDecoder:
        """Build the decoder."""
        return KLDecoder(entries)

    def compile_half(self, device: torch.device) -> None:
        """Compile the GroupNorm kernels."""
        from accel.kernels.group_norm.triton import compile_ahead

        compile_ahead(device)

    def half(self, network: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        """Convert the decoder to float16."""
        # lazy: imports Triton
        from accel.decoders.autoencoder_kl.half import HalfDecoder

        return HalfDecoder(network)


KIND = AutoencoderKL()
