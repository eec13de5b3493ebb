"""Identify weights and modules of RAE's DiT^DH, and derive its sizes."""

from collections.abc import Mapping
from math import ceil, gcd, isqrt
from typing import Any

import torch
from torch import Tensor

from accel.families import rae
from accel.families.dit.weights import models_with
from accel.families.rae.network import DiTDH_models, DiTwDDTHead
from accel.families.repa.weights import TurnedFaceAlone
from accel.families.sit.weights import TRANSPORT
from accel.families.spec import STRUCTURE, FamilyWeights, ModelSpec, ModuleRules, StateDict
from accel.tensors.shapes import Shapes

# Of trunk and head: the embedding (width, C, 1, 1), and a table of rotations (T, d).
PARTS = (
    ("s_embedder.proj.weight", "enc_feat_rope.freqs_cos"),
    ("x_embedder.proj.weight", "dec_feat_rope.freqs_cos"),
)

# Arguments of create_transport and of the constructor; train.py writes `step` and `epoch` alone.
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
    """Return the network of weights with a DiT^DH's entries. The tables of rotations say how wide a
    head is.
    """
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
            "says where the head begins"
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
            # Hidden widths are two thirds of the products with it, both rounded down.
            mlp_ratio=max((ceil(1.5 * n) + 0.01) / width for n, width in zip(hidden, widths)),
            use_qknorm="blocks.0.attn.q_norm.weight" in shapes,
        ),
        num_heads=gcd(*heads),
    )


def of_module(module: Any, state: StateDict) -> ModuleRules | None:
    """Return the rules to read a module with a DiT^DH's entries, None for another module."""
    if not state.keys() >= {*rae.FAMILY.keys}:
        return None
    # Its entries contain all of a LightningDiT's.
    rules = ModuleRules(rae.FAMILY, {}, strength=STRUCTURE + 1)
    if isinstance(module, DiTwDDTHead):
        return rules
    return rules._replace(
        arguments=lambda x, t, y: ((x, 1 - t, y), {}), output=torch.neg, face=OriginalFace
    )


WEIGHTS = FamilyWeights(
    models=DiTDH_models, identify=identify, of_module=of_module, arguments=ARGUMENTS
)


class OriginalFace(TurnedFaceAlone):
    """The original's signature, whose time and velocity are reversed as REPA's. Guidance acts
    inside an interval of times, its ends included.
    """

    def forward_with_cfg(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor,
        cfg_scale: float | Tensor,
        cfg_interval: tuple[float, float] = (0, 1),
        *others: Any,
    ) -> Tensor:
        """Return the guided velocity (2N, C, H, W). Arguments: as for
        models.DiT.forward_with_cfg, and an interval.
        """
        scale = _scale_at(t[: len(t) // 2], cfg_scale, cfg_interval)
        return super().forward_with_cfg(x, t, y, scale)


def _scale_at(t, scale, interval):
    """Return the scale of guidance at times t (N,), 1 outside the interval, (N, 1, 1, 1)."""
    low, high = interval
    return torch.where((t >= low) & (t <= high), scale, 1.0)[:, None, None, None]
