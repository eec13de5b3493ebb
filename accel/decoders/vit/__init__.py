"""The ViT decoder of a representation autoencoder (Zheng et al. 2025, arXiv:2510.11690).

    model.pt                  weights; the file may have any name if it is given by its path
    stat.pt                   mean and var of the latents; or --latent-stats
    config.json               sizes; only needed if the number of heads is not the default
    preprocessor_config.json  mean and std of pixels; only needed if they are not ImageNet's

All files are in one folder.
"""

import logging
import re
from collections.abc import Callable, Mapping
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel.decoders import DecoderFiles, DecoderKind, LatentSpace
from accel.decoders.statistics import read_statistics
from accel.decoders.vit.network import Sizes, ViTDecoder, half_of
from accel.errors import InputRef, UsageError, shown
from accel.families.rae.decoder_facts import HEADS_BY_WIDTH, IMAGENET, LAYER_NORM_EPS
from accel.tensors.shapes import require_fit, shapes_only
from accel.tensors.tensor_files import file_stamps, floats_of, read_json, read_tensors

log = logging.getLogger(__name__)

WEIGHTS_FILES = ("model.safetensors", "model.pt")
STATISTICS_FILE = "stat.pt"
CONFIG_FILE = "config.json"
PREPROCESSOR_FILE = "preprocessor_config.json"
HEADS_ENTRY = "decoder_num_attention_heads"
STATISTICS_EPS = 1e-5
# The encoder of an autoencoder, and a parameter that only the ViT's training uses.
UNUSED = re.compile(r"encoder\.|mask_token$")
PREFIX = re.compile(r"^(module\.|_orig_mod\.)*(decoder\.)?")


def _entries(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict of a decoder's file or of a training checkpoint's moving average, with
    the names of a decoder's file.
    """
    state = content["ema"] if isinstance(content.get("ema"), dict) else content
    return {PREFIX.sub("", str(name)): value for name, value in state.items()}


class ViT(DecoderKind):
    """The decoder of a representation autoencoder."""

    half_batch_size = 16  # three times the throughput of batch size 1; 64 is no faster

    def matches(self, content: Mapping[str, Any]) -> bool:
        """Whether a file has the decoder's tensors, or config.json its number of heads. diffusers'
        class of such autoencoders is not supported.
        """
        if "_class_name" in content:
            return False
        return HEADS_ENTRY in content or "decoder_embed.weight" in _entries(content)

    def files(self, path: Path, statistics: str | None) -> list[Path]:
        """Return the weights, the statistics, and the JSON files next to the weights."""
        weights = next(filter(Path.is_file, [path, *(path / name for name in WEIGHTS_FILES)]), None)
        if weights is None:
            raise UsageError(
                f"must contain {CONFIG_FILE} and {' or '.join(WEIGHTS_FILES)}",
                parameter="vae",
                value=path,
            )
        folder = weights.parent
        if statistics is None and not (folder / STATISTICS_FILE).is_file():
            raise UsageError(
                "does not specify the statistics of its latents",
                f"put {STATISTICS_FILE} next to it, or give `latent_stats`",
                parameter="vae",
                value=path,
            )
        if statistics is not None:
            file_stamps([Path(statistics)], "latent_stats")  # so that an error names this option
        optional = [folder / name for name in (CONFIG_FILE, PREPROCESSOR_FILE)]
        metadata = filter(Path.is_file, optional)
        return [weights, Path(statistics or folder / STATISTICS_FILE), *metadata]

    def read(
        self, files: DecoderFiles, content: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the sizes, and the tensors of weights and statistics."""
        weights, statistics, *metadata_files = self.files(files.path, files.statistics)
        name = f"`vae={weights}`"
        entries = _entries(content if files.path.is_file() else read_tensors(weights, "vae"))
        state = {key: value for key, value in entries.items() if not UNUSED.match(key)}
        state = floats_of(state, InputRef(str(weights), "vae"))
        metadata: dict[str, Any] = {}
        for file in metadata_files:
            metadata |= read_json(file, "vae")
        sizes = _sizes(name, state, metadata)
        if not {HEADS_ENTRY, *IMAGENET} <= metadata.keys():
            log.warning(
                f"{shown(str(weights), 300)}: assuming {sizes['heads']} heads and ImageNet's mean "
                f"and std of pixels where no file specifies them; if that is wrong: put "
                f"{CONFIG_FILE} with {HEADS_ENTRY} and {PREPROCESSOR_FILE} with "
                f"{' and '.join(IMAGENET)} next to it"
            )
        latent_shape = (sizes["channels"], sizes["side"], sizes["side"])
        mean, var = read_statistics(statistics, "var", latent_shape)
        state["latent_mean"] = mean.float()
        state["latent_std"] = (var.float() + STATISTICS_EPS).sqrt()
        state |= _pixel_statistics(weights.parent / PREPROCESSOR_FILE, metadata)
        with shapes_only():
            decoder = self.build(sizes)
        require_fit(InputRef(str(weights), "vae"), state, decoder)
        return sizes, state

    def space(self, files: DecoderFiles, entries: dict[str, Any]) -> LatentSpace:
        """Return a space without statistics, because the module applies them."""
        return LatentSpace(
            entries["channels"], entries["patch"], scale=1.0, side=entries["side"], decoder=files
        )

    def build(self, entries: dict[str, Any]) -> ViTDecoder:
        """Build the decoder."""
        return ViTDecoder(Sizes(**entries))

    def half(self, network: Any) -> Callable[[Tensor], Tensor]:
        """Convert the decoder to float16."""
        return half_of(network)

    def to_uint8_range(self, pixels: Tensor) -> Tensor:
        """Return 255·v of v = (x + 1) / 2, which float32 computes exactly for v ≥ 1/4."""
        return (pixels + 1) / 2 * 255


KIND = ViT()


def _sizes(name: str, state: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Infer the sizes from the tensors, and the number of heads from config.json or the width.
    Raises UsageError about `name` if they disagree.
    """
    try:
        width, channels = state["decoder_embed.weight"].shape
        tokens = state["decoder_pos_embed"].shape[1] - 1
        values = len(state["decoder_pred.weight"])
        mlp = len(state["decoder_layers.0.intermediate.dense.weight"])
    except (KeyError, ValueError, IndexError) as error:
        raise UsageError(f"{name}: is not a ViTDecoder: no {error.args[0]}") from None
    depth = len([key for key in state if key.endswith("layernorm_before.weight")])
    side = isqrt(tokens)
    patch = isqrt(values // 3)
    if side**2 != tokens or 3 * patch**2 != values:
        raise UsageError(
            f"{name}: decodes {tokens} tokens to {values} values each; only square grids and "
            "patches are supported"
        )
    must = {
        "decoder_hidden_size": width,
        "decoder_num_hidden_layers": depth,
        "decoder_intermediate_size": mlp,
        "num_channels": 3,
        "hidden_act": "gelu",
        "qkv_bias": True,
    }
    for key, value in must.items():
        if metadata.get(key, value) != value:
            raise UsageError(
                f"{name}: its {CONFIG_FILE} has {key} {shown(metadata[key])}, must have {value}"
            )
    heads = metadata.get(HEADS_ENTRY, HEADS_BY_WIDTH.get(width))
    eps = metadata.get("layer_norm_eps", LAYER_NORM_EPS)
    if type(heads) is not int or heads < 1 or width % heads:
        raise UsageError(
            f"{name}: the number of heads ({shown(heads)}) is unknown or does not divide the width "
            f"{width}; put a {CONFIG_FILE} with {HEADS_ENTRY} next to it"
        )
    if type(eps) is not float or not 0 < eps < 1:
        raise UsageError(f"{name}: its {CONFIG_FILE} has layer_norm_eps {shown(eps)}")
    return Sizes(channels, side, patch, width, depth, heads, mlp, eps)._asdict()


def _pixel_statistics(file: Path, metadata: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return mean and std (3, 1, 1) of pixels in (0, 1); default: ImageNet's."""
    statistics = {name: metadata.get(name, default) for name, default in IMAGENET.items()}
    for name, values in statistics.items():
        numbers = values if isinstance(values, list) else []
        valid = [type(x) in (int, float) and 0 <= x <= 1 for x in numbers]
        if valid != [True] * 3 or (name == "image_std" and 0 in numbers):
            raise UsageError(
                f"has {name} {shown(values)}, which must be three numbers from 0 to 1",
                parameter="vae",
                value=file,
            )
    return {name: torch.tensor(values).float().view(3, 1, 1) for name, values in statistics.items()}
