"""Identify a JiT from its weights or its module, and derive recommended settings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from accel.families import jit
from accel.families.dit.weights import PATCHES, models_with
from accel.families.dit.weights import identify as dit_identify
from accel.families.jit.network import JiT, JiT_models
from accel.families.lightning_dit.weights import swiglu_ratio
from accel.families.spec import CallAdapter, FamilyWeights, ModelSpec, StateDict
from accel.tensors.shapes import Shapes, shapes_of

FAMILY = jit.FAMILY
FIRST, SECOND, FRONT = FAMILY.keys[:3]  # the two projections of patches, and label positions
START = "in_context_start"  # the first block with label tokens; no tensor implies it
# Options among the training arguments. interval_min and interval_max give guidance_interval.
OPTIONS = "image_size", "cfg_scale", "noise_scale", "t_eps", "num_sampling_steps", "sampler"
ARGUMENTS: dict[str, tuple | str | None] = {
    "model": "model",
    "img_size": "image_size",
    "class_num": "num_classes",
    "cfg": "cfg_scale",
    "interval_min": "interval_min",
    "interval_max": "interval_max",
    "noise_scale": "noise_scale",
    "t_eps": "t_eps",
    "num_sampling_steps": "num_sampling_steps",
    "sampling_method": "sampler",
    "num_classes": "num_classes",
    START: START,
    **dict.fromkeys(("input_size", "patch_size", "in_channels", "hidden_size", "depth")),
    **dict.fromkeys(("num_heads", "mlp_ratio", "attn_drop", "proj_drop", "bottleneck_dim")),
    **dict.fromkeys(("in_context_len", "attn_dropout", "proj_dropout", "epochs", "epoch")),
    **dict.fromkeys(("warmup_epochs", "batch_size", "lr", "blr", "min_lr", "lr_schedule")),
    **dict.fromkeys(("weight_decay", "ema_decay1", "ema_decay2", "P_mean", "P_std", "seed")),
    **dict.fromkeys(("label_drop_prob", "start_epoch", "num_workers", "pin_mem", "num_images")),
    **dict.fromkeys(("eval_freq", "online_eval", "evaluate_gen", "gen_bsz", "data_path")),
    **dict.fromkeys(("output_dir", "resume", "save_last_freq", "log_freq", "device")),
    **dict.fromkeys(("world_size", "local_rank", "dist_on_itp", "dist_url", "rank", "gpu")),
    **dict.fromkeys(("distributed", "dist_backend")),
}


def identify(shapes: Shapes, facts: Mapping[str, Any]) -> ModelSpec:
    """Identify a network with a JiT's entries. The query norm has the head dim."""
    width = shapes[SECOND][0]
    if len(shapes[FIRST]) != 4:
        raise ValueError(
            f"{FIRST} is {shapes[FIRST]}, a linear layer, and only a convolution of patches is "
            "computed"
        )
    depth = sum(name.endswith(".attn.qkv.weight") for name in shapes)
    alike = models_with(JiT_models, depth=depth, hidden_size=width)
    starts = [config[START] for config in alike.values()]
    start = facts.get(START, *starts[:1])
    if not isinstance(start, int) or not 0 < start < depth:
        raise ValueError(
            f"is a JiT of {depth} blocks of width {width}, and no tensor specifies at which block "
            f"its label tokens enter; save {START} in its args, or load it into its class and use "
            "accel.Sampler(module)"
        )
    spec = dit_identify(
        FAMILY,
        JiT,
        JiT_models,
        {**shapes, PATCHES: (width, *shapes[FIRST][1:])},
        facts,
        num_heads=width // shapes["blocks.0.attn.q_norm.weight"][0],
        mlp_ratio=swiglu_ratio(shapes, width),
        bottleneck_dim=shapes[FIRST][0],
        in_context_len=shapes[FRONT][1],
        in_context_start=start,
    )
    return replace(spec, facts={} if start in starts else {START: start})


def recipe(facts: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Convert training arguments to recommended options."""
    options = {name: facts[name] for name in OPTIONS if name in facts}
    if facts.keys() & {"interval_min", "interval_max"}:  # noise level = 1 − time
        low = 1 - facts.get("interval_max", 1)
        high = 1 - facts.get("interval_min", 0)
        options["guidance_interval"] = (low, high)
    return options


def of_module(module: Any, state: StateDict) -> tuple[dict[str, Any], CallAdapter]:
    """Return the facts of a JiT, with the guidance scale for its size, and its call adapter."""
    facts: dict[str, Any] = {"num_heads": module.num_heads, START: module.in_context_start}
    model = identify(shapes_of(state), facts).model
    if model in FAMILY.models:
        facts["recipe"] = dict(cfg_scale=FAMILY.models[model].cfg_scale)
    return facts, CallAdapter(module)


WEIGHTS = FamilyWeights(
    models=JiT_models,
    identify=identify,
    of_module=of_module,
    arguments=ARGUMENTS,
    recipe=recipe,
)
