"""Identify a DiT from its weights."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from accel.errors import UsageError
from accel.families import Family, dit
from accel.families.dit.network import DiT, DiT_models
from accel.families.spec import CallAdapter, FamilyWeights, ModelSpec, StateDict, common_fields
from accel.tensors.shapes import Shapes

PATCHES = "x_embedder.proj.weight"  # a convolution (D, C, p, p)
LAST = "final_layer.linear.weight"
Models = Mapping[str, Callable[..., nn.Module]]

# Arguments, as in `FamilyWeights.arguments`. Of create_diffusion:
DIFFUSION: dict[str, tuple | str | None] = {
    "noise_schedule": ("linear",),
    "predict_xstart": (False,),
    "diffusion_steps": (1000,),
    "learn_sigma": "learn_sigma",
    "sigma_small": "sigma_small",
    **dict.fromkeys(("timestep_respacing", "use_kl", "rescale_learned_sigmas")),
}
# Of the constructor. Tensors imply the sizes.
NETWORK: dict[str, tuple | str | None] = {
    "num_classes": "num_classes",
    "num_heads": "num_heads",
    "learn_sigma": "learn_sigma",
    **dict.fromkeys(("input_size", "patch_size", "in_channels", "hidden_size", "depth")),
    **dict.fromkeys(("mlp_ratio", "class_dropout_prob")),
}
# Of train.py, and of fast-DiT's.
TRAINING: dict[str, tuple | str | None] = {
    "model": "model",
    "image_size": "image_size",
    "num_classes": "num_classes",
    "vae": "vae",
    **dict.fromkeys(("data_path", "results_dir", "epochs", "global_batch_size", "global_seed")),
    **dict.fromkeys(("num_workers", "log_every", "ckpt_every", "feature_path")),
}
ARGUMENTS = {**DIFFUSION, **NETWORK, **TRAINING}


def require_heads(heads: int | None, kind: str, width: int) -> int:
    """Return the number of heads. Raises UsageError if it is unknown, ValueError if the width is
    not divisible by it.
    """
    if heads is None:
        raise UsageError(
            f"is a {kind} of width {width}, and no tensor specifies how many heads it has",
            parameter="num_heads",
        )
    if width % heads:
        raise ValueError(
            f"specifies {heads} heads, which do not divide its width {width}; correct its "
            "configuration"
        )
    return heads


def models_with(models: Models, **sizes: Any) -> dict[str, dict[str, Any]]:
    """Return the models with these sizes: name → configuration."""
    configs = {name: build.config for name, build in models.items()}  # type: ignore
    return {name: config for name, config in configs.items() if sizes.items() <= config.items()}


def identify(
    family: Family,
    network: Callable[..., nn.Module],
    models: Models,
    shapes: Shapes,
    facts: Mapping[str, Any],
    num_heads: int | None = None,
    mlp_ratio: float | None = None,
    **arguments: Any,
) -> ModelSpec:
    """Identify a network whose patch embedding and blocks have a DiT's names.

    network: the class. models: its named sizes. num_heads: if the tensors imply it; else the
    metadata's, else that of the named model with this depth, width and patch. mlp_ratio: of another
    MLP than a DiT's. arguments: further arguments of the constructor.
    """
    if len(shapes[PATCHES]) != 4:
        raise ValueError(f"{PATCHES} is {shapes[PATCHES]}, must have four dimensions")
    width, channels, patch, _ = shapes[PATCHES]
    if mlp_ratio is None:  # the constructor rounds mlp_ratio * width down
        mlp_ratio = (shapes["blocks.0.mlp.fc1.weight"][0] + 0.5) / width
    depth = sum(name.endswith(".attn.qkv.weight") for name in shapes)
    sizes = dict(depth=depth, hidden_size=width, patch_size=patch)
    # A model with another patch has the same number of heads.
    named = models_with(models, **sizes)
    alike = named or models_with(models, depth=depth, hidden_size=width)
    default = next((config["num_heads"] for config in alike.values()), None)
    specified = num_heads or facts.get("num_heads")
    heads = require_heads(specified or default, f"{family.name} of {depth} blocks", width)
    learn_sigma = shapes[LAST][0] == 2 * channels * patch**2
    return ModelSpec(
        family,
        model=next(iter(named), f"{family.name}-{depth}x{width}/{patch}"),
        network=network,
        arguments=dict(
            **sizes,
            **arguments,
            mlp_ratio=mlp_ratio,
            in_channels=channels,
            num_heads=heads,
            learn_sigma=learn_sigma,
            input_size=16 * patch,
        ),
        num_heads=heads,
        assumes_heads=specified is None,
        default_heads=bool(named) and heads == default,
        in_channels=channels,
        learn_sigma=learn_sigma,
        **common_fields(shapes, facts, patch),
    )


def of_module(module: Any, state: StateDict) -> tuple[dict[str, Any], CallAdapter]:
    """Return the facts of a DiT (this repository's, the original or diffusers') and its call
    adapter.
    """
    if hasattr(module, "transformer_blocks"):
        from accel.families.dit import diffusers_module  # lazy import: only for diffusers

        return diffusers_module.of_module(module)
    return {"num_heads": module.num_heads}, CallAdapter(module)


WEIGHTS = FamilyWeights(
    models=DiT_models,
    identify=partial(identify, dit.FAMILY, DiT, DiT_models),
    of_module=of_module,
    arguments=ARGUMENTS,
)
