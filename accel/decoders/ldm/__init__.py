"""AutoencoderKL in the checkpoint layout of the latent-diffusion code (arXiv:2112.10752).

VA-VAE (Yao et al. 2025, arXiv:2501.01423) is published this way: one file with encoder, decoder
and losses, next to latents_stats.pt.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from accel.decoders import DecoderFiles, LatentSpace
from accel.decoders.autoencoder_kl import SD_VAE_FT, AutoencoderKL
from accel.decoders.statistics import with_statistics
from accel.errors import InputRef, UsageError, shown, warn
from accel.tensors.tensor_files import floats_of

STATISTICS_FILE = "latents_stats.pt"
PIPELINE_PREFIX = "first_stage_model."  # in checkpoints of a whole pipeline
# LDM's names → diffusers'.
_MIDDLE = {"block_1": "resnets.0", "attn_1": "attentions.0", "block_2": "resnets.1"}
_LEVEL = {"block": "resnets", "attn": "attentions", "upsample": "upsamplers.0"}
_LAYER = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
_LAYER |= {"nin_shortcut": "conv_shortcut", "norm_out": "conv_norm_out"}


def _entries(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict of a file that contains the autoencoder or a whole pipeline."""
    nested = (content.get(name) for name in ("state_dict", "model"))
    state = next((entries for entries in nested if isinstance(entries, dict)), content)
    return {str(name).removeprefix(PIPELINE_PREFIX): value for name, value in state.items()}


class LDM(AutoencoderKL):
    """AutoencoderKL in a single file with LDM's names."""

    def matches(self, content: Mapping[str, Any]) -> bool:
        """Whether the file has tensors with LDM's decoder names."""
        names = _entries(content)
        return any(re.match(r"decoder\.(conv_in|mid|up|conv_out)\.", name) for name in names)

    def files(self, path: Path, statistics: str | None) -> list[Path]:
        """Return the file. Statistics belong to the latent space."""
        return [path]

    def read(
        self, files: DecoderFiles, content: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the equivalent config.json and the decoder's weights."""
        config, state = _to_diffusers(files.path, content)
        return self.checked(files.path, config, files.path, state)

    def space(self, files: DecoderFiles, entries: dict[str, Any]) -> LatentSpace:
        """Return the latent space, with statistics from --latent-stats or next to the file. If
        there are none, assume Stable Diffusion's scale where the sizes match, with a notice.
        """
        space = super().space(files, entries)
        statistics = files.path.parent / STATISTICS_FILE
        if space.std:
            return space
        if statistics.is_file():
            return with_statistics(space, statistics)
        default = LatentSpace()
        if (space.channels, space.factor) != (default.channels, default.factor):
            raise UsageError(
                "does not specify the scale of its latents",
                f"put {STATISTICS_FILE} next to it, or give `latent_stats`",
                parameter="vae",
                value=files.path,
            )
        warn(
            f"{shown(str(files.path), 300)}: does not specify the scale of its latents, assuming "
            f"Stable Diffusion's {default.scale}; if it is another: `latent_stats=FILE`"
        )
        return space._replace(scale=default.scale)


KIND = LDM()


def _to_diffusers(
    file: Path, content: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Convert LDM's state dict to diffusers' (config, state dict) of the decoder. Raises
    UsageError.
    """
    state = {
        name: value
        for name, value in _entries(content).items()
        if re.match(r"decoder\.|post_quant_conv\.", name)
    }
    state = floats_of(state, InputRef(str(file), "vae"))
    level_names = {name.split(".")[2] for name in state if name.startswith("decoder.up.")}
    levels = sorted(int(level) for level in level_names if level.isdecimal())
    pattern = re.compile(r"decoder\.up\.0\.block\.\d+\.conv1\.weight")
    blocks = len(list(filter(pattern.fullmatch, state)))
    try:
        widths = [len(state[f"decoder.up.{level}.block.0.conv1.weight"]) for level in levels]
        channels = state["decoder.conv_in.weight"].shape[1]
    except (KeyError, IndexError) as error:
        raise UsageError(
            f"is not an AutoencoderKL in LDM's layout: no {error.args[0]}",
            parameter="vae",
            value=file,
        ) from None
    attends = [f"decoder.up.{level}.attn.0.q.weight" in state for level in reversed(levels)]
    config = SD_VAE_FT | dict(
        block_out_channels=widths,
        layers_per_block=blocks - 1,
        latent_channels=channels,
        up_block_types=[
            "AttnUpDecoderBlock2D" if attended else "UpDecoderBlock2D" for attended in attends
        ],
        use_post_quant_conv="post_quant_conv.weight" in state,
        mid_block_add_attention="decoder.mid.attn_1.q.weight" in state,
        scaling_factor=1.0,
    )
    return config, {_diffusers_name(name, len(levels) - 1): value for name, value in state.items()}


def _diffusers_name(name, last):
    """Translate a tensor name. diffusers numbers levels from the latent, LDM from the image."""
    *path, layer, parameter = name.split(".")
    match path:
        case ["decoder", "mid", where]:
            path = "decoder", "mid_block", _MIDDLE.get(where, where)
        case ["decoder", "up", level, where, *number] if level.isdecimal():
            path = "decoder", "up_blocks", str(last - int(level)), _LEVEL.get(where, where), *number
    return ".".join((*path, _LAYER.get(layer, layer), parameter))
