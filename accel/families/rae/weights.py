"""Identify RAE's DiT^DH from its weights or its module."""

from collections.abc import Callable, Mapping
from math import ceil, gcd, isqrt
from typing import Any

import torch
from torch import Tensor

from accel.families import rae
from accel.families.dit.weights import models_with
from accel.families.rae.network import DiTDH_models, DiTwDDTHead
from accel.families.repa.weights import called_reversed
from accel.families.sit.weights import TRANSPORT
from accel.families.spec import CallAdapter, FamilyWeights, ModelSpec, StateDict, common_fields
from accel.tensors.shapes import Shapes

# Of trunk and head: patch embedding (width, C, 1, 1) and rotation table (T, d).
PARTS = (
    ("s_embedder.proj.weight", "enc_feat_rope.freqs_cos"),
    ("x_embedder.proj.weight", "dec_feat_rope.freqs_cos"),
)

# Of create_transport and the constructor. train.py itself only writes `step` and `epoch`.
ARGUMENTS: dict[str, tuple | str | None] = {
    **TRANSPORT,
    **dict.fromkeys(("time_dist_type", "time_dist_shift")),
    "patch_size": (1,),
    "use_swiglu": (True,),
    "use_rope": (True,),
    "use_rmsnorm": (True,),
    "use_pos_embed": (True,),
    "wo_shift": (False,),
    "num_classes": "num_classes",
    **dict.fromkeys(("input_size", "in_channels", "hidden_size", "depth", "num_heads")),
    **dict.fromkeys(("mlp_ratio", "class_dropout_prob", "use_qknorm", "step", "epoch")),
}


def identify(shapes: Shapes, facts: Mapping[str, Any]) -> ModelSpec:
    """Identify a network with a DiT^DH's entries. The rotation tables have the head dims."""
    widths: tuple[int, ...] = ()  # of trunk and head
    heads: tuple[int, ...] = ()
    for embedder, table in PARTS:
        width, channels = shapes[embedder][:2]
        tokens, head_dim = shapes[table]
        if head_dim % 4 or width % head_dim:
            raise ValueError(
                f"{table} is for heads of {head_dim}, into which a width of {width} does not "
                "divide; save it again"
            )
        widths += (width,)
        heads += (width // head_dim,)
    if widths[0] == widths[1]:
        raise ValueError(
            "is a DiTDH whose trunk is as wide as its head, which is not computed here: no tensor "
            "specifies where the head begins"
        )
    of_blocks = [shape[1] for name, shape in shapes.items() if name.endswith("attn.qkv.weight")]
    depth = tuple(map(of_blocks.count, widths))
    config: dict[str, Any] = dict(hidden_size=widths, depth=depth, num_heads=heads)
    sizes = "+".join(f"{count}x{width}" for count, width in zip(depth, widths))
    hidden = [shapes[f"blocks.{block}.mlp.w3.weight"][1] for block in (0, depth[0])]
    return ModelSpec(
        rae.FAMILY,
        model=next(iter(models_with(DiTDH_models, **config)), f"DiTDH-{sizes}/1"),
        network=DiTwDDTHead,
        arguments=dict(
            **config,
            input_size=isqrt(tokens),
            in_channels=channels,
            # Hidden width = 2/3 · mlp_ratio · width, both products rounded down.
            mlp_ratio=max((ceil(1.5 * n) + 0.01) / width for n, width in zip(hidden, widths)),
            use_qknorm="blocks.0.attn.q_norm.weight" in shapes,
        ),
        num_heads=gcd(*heads),
        in_channels=channels,
        learn_sigma=False,
        **common_fields(shapes, facts, patch_size=1),
    )


def of_module(module: Any, state: StateDict) -> tuple[dict[str, Any], CallAdapter]:
    """Return the call adapter of a DiT^DH. The original class reverses time and velocity, as
    REPA's.
    """
    if isinstance(module, DiTwDDTHead):
        return {}, CallAdapter(module)
    return {}, called_reversed(module)._replace(forward_with_cfg=_inside_an_interval)


def _inside_an_interval(
    method: Callable[..., Tensor],
    x: Tensor,
    t: Tensor,
    y: Tensor,
    cfg_scale: float | Tensor,
    cfg_interval: tuple[float, float] = (0, 1),
) -> Tensor:
    """Return the original's guided velocity (2N, C, H, W). Outside the closed interval
    `cfg_interval` of times it is the conditional velocity.
    """
    low, high = cfg_interval
    time = t[: len(t) // 2]
    # (N, 1, 1, 1)
    scale = torch.where((time >= low) & (time <= high), cfg_scale, 1.0)[:, None, None, None]
    return -method(x, 1 - t, y, scale)


WEIGHTS = FamilyWeights(
    models=DiTDH_models, identify=identify, of_module=of_module, arguments=ARGUMENTS
)
