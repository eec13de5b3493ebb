"""Recognise the files of a DiT, and derive its sizes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from accel.families import Family, dit
from accel.families.dit import diffusers_module
from accel.families.dit.network import DiT, DiT_models, get_2d_sincos_pos_embed
from accel.families.loaded_module import OfModule
from accel.families.recognise import Sizes
from accel.weights.shapes import Shapes

PATCHES = "x_embedder.proj.weight"  # a convolution (D, C, p, p)
LAST = "final_layer.linear.weight"
LABELS = "y_embedder.embedding_table.weight"
MODELS = DiT_models  # name → constructor
KEYS = PATCHES, "blocks.0.attn.qkv.weight"


def sizes(shapes: Shapes, metadata: dict[str, Any]) -> Sizes:
    """Return (name, constructor, heads) of the model with weights of these shapes, as
    families/recognise.py asks.
    """
    return sizes_of(shapes, metadata.get("num_heads"), DiT, dit.FAMILY.name, DiT_models)


def sizes_of(
    shapes: Shapes,
    num_heads: int | None,
    network: type[DiT],
    family: str,
    models: Mapping[str, Callable],
) -> Sizes:
    """Return (name, constructor, heads) of a `network` with DiT's entries, from their
    shapes.

    num_heads: from the file, or None to take it from the model with this depth, width and
    patch; no tensor holds it. models: constructors by name. Raises KeyError for a missing
    entry, ValueError if the number of heads is unknown or does not fit.
    """
    if len(shapes[PATCHES]) != 4:
        raise ValueError(f"{PATCHES} is {shapes[PATCHES]}, must have four dimensions")
    width, channels, patch, _ = shapes[PATCHES]
    depth = sum(name.endswith(".attn.qkv.weight") for name in shapes)
    hidden = shapes["blocks.0.mlp.fc1.weight"][0]
    found = dict(depth=depth, hidden_size=width, patch_size=patch)
    known = {
        name: build.config
        for name, build in models.items()
        if found.items() <= build.config.items()
    }
    name, config = next(iter(known.items()), (f"{family}-{depth}x{width}/{patch}", {}))
    heads = require_heads(
        num_heads or config.get("num_heads"), f"{family} of {depth} blocks", width
    )
    build = partial(
        network,
        **found,
        in_channels=channels,
        num_heads=heads,
        mlp_ratio=(hidden + 0.5) / width,
        learn_sigma=shapes[LAST][0] == 2 * channels * patch**2,
        input_size=config.get("input_size", 16 * patch),
    )
    return name, build, heads


def require_heads(heads: int | None, what: str, width: int) -> int:
    """Return the number of heads. Raises ValueError if it is unknown, or does not divide
    the width.
    """
    if heads is None:
        raise ValueError(
            f"is a {what} of width {width}, and no tensor says how many heads it has; load it "
            "into its class and use accel.Sampler(module)"
        )
    if width % heads:
        raise ValueError(
            f"says {heads} heads, which do not divide its width {width}; correct its configuration"
        )
    return heads


def converted(state: dict[str, torch.Tensor], metadata: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return `state` with the position table, which diffusers' layout lacks, computed for
    the latent's side.
    """
    if "pos_embed" in state or "latent_size" not in metadata or PATCHES not in state:
        return state
    kernel = state[PATCHES]  # (D, C, p, p)
    table = get_2d_sincos_pos_embed(len(kernel), metadata["latent_size"] // kernel.shape[-1])
    return {**state, "pos_embed": torch.from_numpy(table).to(kernel.dtype).unsqueeze(0)}


sampled = converted  # diffusers' layout has no position table, a file of ours has


def of_module(module: nn.Module, state: dict[str, torch.Tensor]) -> OfModule | None:
    """Return the rules to read a DiT: this repository's, the original or diffusers'. None
    for another module.
    """
    if hasattr(module, "transformer_blocks"):
        return diffusers_module.of_module(module)
    return of_dit(dit.FAMILY, module, state)


def of_dit(
    family: Family, module: nn.Module, state: dict[str, torch.Tensor], **how: Any
) -> OfModule | None:
    """Return the rules to read a module with DiT's entries; None for another module. how:
    other fields of OfModule.
    """
    if not all(name in state for name in KEYS):
        return None
    return OfModule(family, dict(num_heads=module.num_heads), **how)
