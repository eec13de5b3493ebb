"""Recognise the files of a Large-DiT, and derive its sizes."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from accel.families import large_dit
from accel.families.dit.weights import LABELS, LAST, require_heads
from accel.families.large_dit.network import DiT_Llama, Large_DiT_models
from accel.families.loaded_module import OfModule
from accel.families.recognise import Sizes
from accel.weights.shapes import Shapes

__all__ = ["KEYS", "LABELS", "MODELS", "of_module", "sizes"]
PATCHES = "x_embedder.weight"  # (D, C·p·p)
QK_NORM = "layers.0.attention.q_norm.weight"
MODELS = Large_DiT_models  # name → constructor
KEYS = PATCHES, "layers.0.attention.wq.weight"


def sizes(shapes: Shapes, metadata: dict[str, Any]) -> Sizes:
    """Return (name, constructor, heads) of the model with weights of these shapes, as
    families/recognise.py asks.

    No tensor holds the number of heads, the patch and the channels. The metadata give
    them, else the model with this depth and width gives the heads, and patch and channels
    are 2 and 4.
    """
    depth = sum(name.endswith(".attention.wq.weight") for name in shapes)
    dim = shapes[PATCHES][0]
    found = dict(n_layers=depth, dim=dim)
    known = {
        name: build.config
        for name, build in MODELS.items()
        if found.items() <= build.config.items()
    }
    name, config = next(iter(known.items()), (f"{large_dit.FAMILY.name}-{depth}x{dim}/2", {}))
    heads = require_heads(
        metadata.get("num_heads") or config.get("n_heads"), f"Large-DiT of {depth} blocks", dim
    )
    qk_norm = QK_NORM in shapes
    if "qk_norm" in metadata and bool(metadata["qk_norm"]) != qk_norm:
        raise ValueError(
            f"model_args.pth says {'no ' * (not metadata['qk_norm'])}qk_norm, and the weights "
            f"{'have it' if qk_norm else 'have none'}; they are of two runs: copy the folder "
            "again, or remove it"
        )
    patch = metadata.get("patch_size", 2)
    channels = metadata.get("in_channels", 4)
    hidden = shapes["layers.0.feed_forward.w1.weight"][0]
    build = partial(
        DiT_Llama,
        **found,
        input_size=config.get("input_size", 32),
        patch_size=patch,
        in_channels=channels,
        n_heads=heads,
        n_kv_heads=shapes["layers.0.attention.wk.weight"][0] * heads // dim,
        multiple_of=1,
        ffn_dim_multiplier=(hidden + 0.5) / int(8 * dim / 3),
        learn_sigma=shapes[LAST][0] == 2 * channels * patch**2,
        qk_norm=qk_norm,
    )
    return name, build, heads


def of_module(module: nn.Module, state: dict[str, Tensor]) -> OfModule | None:
    """Return the rules to read a module with a Large-DiT's entries, or None for another module."""
    if not all(name in state for name in KEYS):
        return None
    facts = dict(
        num_heads=len(state[PATCHES]) // module.layers[0].attention.head_dim,
        patch_size=module.patch_size,
        in_channels=module.in_channels,
    )
    return OfModule(large_dit.FAMILY, facts, module.input_size)
