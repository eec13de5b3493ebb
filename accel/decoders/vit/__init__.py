"""The ViT decoder of a representation autoencoder (Zheng et al. 2025, arXiv:2510.11690).

    model.pt                  its weights, of any name; or a folder with this file
    stat.pt                   mean and var of the latents; or --latent-stats
    config.json               the decoder's sizes; needed for another number of heads than usual
    preprocessor_config.json  mean and deviation of pixels; needed for others than ImageNet's

All lie in one folder.
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
from accel.errors import UsageError, about, shown
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
# Other parts of an autoencoder, and a leftover of the ViT's own training, which no decoder reads.
UNUSED = re.compile(r"encoder\.|mask_token$")


def _entries(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a decoder's file, or of the moving average of an autoencoder's
    training run, under the names that they have in the former.
    """
    whole = content["ema"] if isinstance(content.get("ema"), dict) else content
    prefix = re.compile(r"^(module\.|_orig_mod\.)*(decoder\.)?")
    return {prefix.sub("", str(name)): value for name, value in whole.items()}


class ViT(DecoderKind):
    """The decoder of a representation autoencoder."""

    half_batch_size = 16  # three times the pictures a second of one at a time; 64 are no faster

    def matches(self, content: Mapping[str, Any]) -> bool:
        """Return whether a file has the decoder's tensors, or a config.json its heads. diffusers'
        own class of such autoencoders is another one.
        """
        if "_class_name" in content:
            return False
        return HEADS_ENTRY in content or "decoder_embed.weight" in _entries(content)

    def files(self, path: Path, statistics: str | None) -> list[Path]:
        """Return the weights, the statistics, and the facts beside the weights."""
        possible = [path, *(path / name for name in WEIGHTS_FILES)]
        weights = next(filter(Path.is_file, possible), None)
        if weights is None:
            raise UsageError(
                f"must hold {CONFIG_FILE} and {' or '.join(WEIGHTS_FILES)}",
                parameter="vae",
                value=path,
            )
        beside = weights.parent
        if statistics is None and not (beside / STATISTICS_FILE).is_file():
            raise UsageError(
                "says no statistics of its latents",
                f"put {STATISTICS_FILE} beside it, or give `latent_stats`",
                parameter="vae",
                value=path,
            )
        if statistics is not None:
            file_stamps([Path(statistics)], "latent_stats")  # an error names this option
        facts = [
            beside / name for name in (CONFIG_FILE, PREPROCESSOR_FILE) if (beside / name).is_file()
        ]
        return [weights, Path(statistics or beside / STATISTICS_FILE), *facts]

    def read(
        self, files: DecoderFiles, content: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the sizes, and the tensors of weights and statistics."""
        weights, statistics, *facts = self.files(files.path, files.statistics)
        name = f"`vae={weights}`"
        entries = _entries(content if files.path.is_file() else read_tensors(weights, "vae"))
        state = {key: value for key, value in entries.items() if not UNUSED.match(key)}
        state = floats_of(state, about("vae", weights))
        metadata: dict[str, Any] = {}
        for file in facts:
            metadata |= read_json(file, "vae")
        sizes = _sizes(name, state, metadata)
        _log_assumptions(weights, metadata, sizes)
        latent_shape = (sizes["channels"], sizes["side"], sizes["side"])
        mean, var = read_statistics(statistics, "var", latent_shape)
        state["latent_mean"] = mean.float()
        state["latent_std"] = (var.float() + STATISTICS_EPS).sqrt()
        state |= _pixel_statistics(weights.parent / PREPROCESSOR_FILE, metadata)
        with shapes_only():
            decoder = self.build(sizes)
        require_fit(about("vae", weights), state, decoder)
        return sizes, state

    def space(self, files: DecoderFiles, entries: dict[str, Any]) -> LatentSpace:
        """Return the space of normalised latents: the decoder has the statistics."""
        return LatentSpace(
            entries["channels"], entries["patch"], scale=1.0, side=entries["side"], decoder=files
        )

    def build(self, entries: dict[str, Any]) -> ViTDecoder:
        """Return the decoder."""
        return ViTDecoder(Sizes(**entries))

    def half(self, network: Any) -> Callable[[Tensor], Tensor]:
        """Return the decoder in float16."""
        return half_of(network)

    def to_uint8_range(self, pixels: Tensor) -> Tensor:
        """Return 255·v of pixels v = (x + 1)/2: exact for v ≥ 1/4, else v has 25 bits."""
        return (pixels + 1) / 2 * 255


KIND = ViT()


def _sizes(name: str, state: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of a decoder by its tensors; the heads as config.json says, else by the
    width. Raises UsageError about `name` where they contradict each other.
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
            f"{name}: decodes {tokens} tokens to {values} values each; only squares are computed "
            "here"
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
            f"{name}: has an unknown number of heads ({shown(heads)}) of a width of {width}; put a "
            f"{CONFIG_FILE} with {HEADS_ENTRY} beside it"
        )
    if type(eps) is not float or not 0 < eps < 1:
        raise UsageError(f"{name}: its {CONFIG_FILE} has layer_norm_eps {shown(eps)}")
    return Sizes(channels, side, patch, width, depth, heads, mlp, eps)._asdict()


def _log_assumptions(weights, metadata, sizes):
    """Print what no file says, and the remedy."""
    remedies = {}  # of what is assumed
    if HEADS_ENTRY not in metadata:
        heads = f"{sizes['heads']} heads, as a width of {sizes['width']} usually has"
        remedies[heads] = f"{CONFIG_FILE} with {HEADS_ENTRY}"
    if not IMAGENET.keys() <= metadata.keys():
        colours = "ImageNet's mean and deviation of pixels"
        remedies[colours] = f"{PREPROCESSOR_FILE} with {' and '.join(IMAGENET)}"
    if remedies:
        log.warning(
            f"{shown(str(weights), 300)}: taken with {', and '.join(remedies)}; if it has others: "
            f"put {' and '.join(remedies.values())} beside it"
        )


def _pixel_statistics(file: Path, metadata: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return mean and deviation of pixels in (0, 1), (3, 1, 1). Raises UsageError."""
    colours = {name: metadata.get(name, usual) for name, usual in IMAGENET.items()}
    for name, values in colours.items():
        numbers = values if isinstance(values, list) else []
        valid = [type(x) in (int, float) and 0 <= x <= 1 for x in numbers]
        if valid != [True] * 3 or (name == "image_std" and 0 in numbers):
            raise UsageError(
                f"says {name} {shown(values)}, which must be three numbers from 0 to 1",
                parameter="vae",
                value=file,
            )
    return {name: torch.tensor(values).float().view(3, 1, 1) for name, values in colours.items()}
