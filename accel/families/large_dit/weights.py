"""Identify a Large-DiT from its weights."""

from collections.abc import Mapping
from typing import Any

from accel.families import large_dit
from accel.families.dit.weights import DIFFUSION, LAST, TRAINING, models_with, require_heads
from accel.families.large_dit.network import DiT_Llama, Large_DiT_models
from accel.families.spec import CallAdapter, FamilyWeights, ModelSpec, StateDict, common_fields
from accel.tensors.shapes import Shapes

PATCHES = "x_embedder.weight"  # (D, C·p·p)
QK_NORM = "layers.0.attention.q_norm.weight"
ARGUMENTS: dict[str, tuple | str | None] = {
    **DIFFUSION,
    **TRAINING,
    "n_heads": "num_heads",
    "qk_norm": "qk_norm",
    "patch_size": "patch_size",
    "in_channels": "in_channels",
    "norm_eps": (1e-5,),
    **dict.fromkeys(("input_size", "dim", "n_layers", "n_kv_heads", "multiple_of")),
    **dict.fromkeys(("ffn_dim_multiplier", "class_dropout_prob", "max_steps", "lr", "wd")),
    **dict.fromkeys(("micro_batch_size", "master_port", "data_parallel", "precision")),
    **dict.fromkeys(("grad_precision", "grad_clip", "local_diffusers_model_root")),
    **dict.fromkeys(("auto_resume", "resume", "init_from")),
}


def identify(shapes: Shapes, facts: Mapping[str, Any]) -> ModelSpec:
    """Identify a network with a Large-DiT's entries.

    No tensor implies the number of heads, the patch and the channels. Without metadata, the heads
    come from the named model with this depth and width, the patch is 2 and the channels are 4.
    """
    depth = sum(name.endswith(".attention.wq.weight") for name in shapes)
    dim = shapes[PATCHES][0]
    sizes = dict(n_layers=depth, dim=dim)
    alike = models_with(Large_DiT_models, **sizes)
    default = next((config["n_heads"] for config in alike.values()), None)
    specified = facts.get("num_heads")
    family = large_dit.FAMILY
    heads = require_heads(specified or default, f"{family.name} of {depth} blocks", dim)
    qk_norm = QK_NORM in shapes
    if "qk_norm" in facts and bool(facts["qk_norm"]) != qk_norm:
        raise ValueError(
            f"model_args.pth specifies {'no ' * (not facts['qk_norm'])}qk_norm, and the weights "
            f"{'have it' if qk_norm else 'have none'}; they are of two runs: copy the folder "
            "again, or remove it"
        )
    patch = facts.get("patch_size", 2)
    channels = facts.get("in_channels", 4)
    learn_sigma = shapes[LAST][0] == 2 * channels * patch**2
    hidden = shapes["layers.0.feed_forward.w1.weight"][0]
    return ModelSpec(
        family,
        model=next(iter(alike), f"{family.name}-{depth}x{dim}/2"),
        network=DiT_Llama,
        arguments=dict(
            **sizes,
            patch_size=patch,
            in_channels=channels,
            n_heads=heads,
            n_kv_heads=shapes["layers.0.attention.wk.weight"][0] * heads // dim,
            multiple_of=1,
            ffn_dim_multiplier=(hidden + 0.5) / int(8 * dim / 3),
            learn_sigma=learn_sigma,
            qk_norm=qk_norm,
        ),
        num_heads=heads,
        assumes_heads=specified is None,
        default_heads=heads == default,
        in_channels=channels,
        learn_sigma=learn_sigma,
        **common_fields(shapes, facts, patch),
    )


def of_module(module: Any, state: StateDict) -> tuple[dict[str, Any], CallAdapter]:
    """Return the facts of a Large-DiT, and its call adapter."""
    facts = dict(
        num_heads=len(state[PATCHES]) // module.layers[0].attention.head_dim,
        patch_size=module.patch_size,
        in_channels=module.in_channels,
    )
    return facts, CallAdapter(module)


WEIGHTS = FamilyWeights(Large_DiT_models, identify, of_module, arguments=ARGUMENTS)
