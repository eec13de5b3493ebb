"""Recognise the files and modules of a LightningDiT, derive its sizes, and convert its entries."""

from typing import Any

import torch
from torch import Tensor, nn

from accel.families import lightning_dit
from accel.families.dit.weights import KEYS as DIT_KEYS
from accel.families.dit.weights import LABELS, PATCHES, of_dit, sizes_of
from accel.families.lightning_dit.network import LightningDiT, LightningDiT_models, rotation_table
from accel.families.lightning_dit.recipe import recipe
from accel.families.loaded_module import OfModule
from accel.families.recognise import STRUCTURE, Sizes
from accel.weights.shapes import Shapes

__all__ = ["KEYS", "LABELS", "MODELS", "converted", "of_module", "recipe", "sizes"]
MODELS = LightningDiT_models  # name → constructor
KEYS = *DIT_KEYS, "blocks.0.mlp.w12.weight"
COS = "feat_rope.freqs_cos"
SIN = "feat_rope.freqs_sin"  # each (T, d), every number twice
MODULATION = ".adaLN_modulation.1."


def sizes(shapes: Shapes, metadata: dict[str, Any]) -> Sizes:
    """Return (name, constructor, heads) of the model with weights of these shapes, as
    families/recognise.py asks.
    """
    if COS not in shapes:
        raise ValueError("is a LightningDiT without rotation, which is not computed here")
    width = shapes[PATCHES][0]
    hidden = shapes["blocks.0.mlp.w3.weight"][1]
    head = shapes[COS][-1]
    if shapes[SIN] != shapes[COS] or head % 4 or width % head:
        raise ValueError(
            f"{COS} is {shapes[COS]}, which is no table of heads of a width of {width}; save it "
            "again"
        )
    # The hidden width is two thirds of a DiT's, rounded down.
    of_dit_shapes = {**shapes, "blocks.0.mlp.fc1.weight": (hidden * 3 // 2 + 1,)}
    name, build, heads = sizes_of(
        of_dit_shapes, width // head, LightningDiT, lightning_dit.FAMILY.name, MODELS
    )
    build.keywords["qk_norm"] = "blocks.0.attn.q_norm.weight" in shapes
    return name, build, heads


def converted(state: dict[str, Tensor], metadata: dict[str, Any]) -> dict[str, Tensor]:
    """Return the state dict of the reference network. The network computes the table of
    rotations, so drop it. Fill modulations of four vectors up to six with zero shifts.
    Raises ValueError for a table of other rotations.
    """
    kept = {name: value for name, value in state.items() if name not in (COS, SIN)}
    if COS in state and not state[COS].is_meta:
        tokens, head = state[COS].shape
        for name, want in rotations(head, round(tokens**0.5)).items():
            if (
                want.shape != state[name].shape
                or (state[name].cpu().float() - want).abs().amax() > 0.02
            ):
                raise ValueError(
                    f"{name} has other rotations than those by row and column that are computed "
                    "here"
                )
    for name, value in kept.items():
        if (
            name.startswith("blocks.")
            and MODULATION in name
            and len(value) == 4 * len(state[PATCHES])
        ):
            # (2, 2·D, …): scale and gate of attention, then of the MLP
            halves = value.unflatten(0, (2, -1))
            kept[name] = torch.cat(
                [torch.zeros_like(halves).chunk(2, dim=1)[0], halves], dim=1
            ).flatten(0, 1)
    return kept


def rotations(head: int, side: int) -> dict[str, Tensor]:
    """Return a file's entries for heads of `head` channels on side² tokens."""
    # (T, d, 2)
    table = rotation_table(head, side, torch.float32, "cpu").repeat_interleave(2, dim=1)
    return dict(zip((COS, SIN), table.unbind(-1)))


def of_module(module: nn.Module, state: dict[str, Tensor]) -> OfModule | None:
    """Return the rules to read a module with a LightningDiT's entries, or None for
    another module.
    """
    if not state.keys() >= set(KEYS):
        if any(lightning_dit.FAMILY.name in kind.__name__ for kind in type(module).__mro__):
            raise ValueError("is a LightningDiT without SwiGLU, which is not computed here")
        return None
    how = of_dit(lightning_dit.FAMILY, module, state, strength=STRUCTURE, face=IntervalFace)
    if not isinstance(module, LightningDiT):
        return how
    # The class here computes its rotations; its state dict has none.
    table = rotations(len(state[PATCHES]) // module.num_heads, module.x_embedder.grid_size[0])
    return how._replace(read=lambda state: {**state, **table})


class IntervalFace:
    """LightningDiT's signature over `accelerated.Accelerated`: guidance may begin at a
    later time.
    """

    def forward_with_cfg(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor,
        cfg_scale: float | Tensor,
        cfg_interval: bool | None = None,
        cfg_interval_start: float | None = None,
    ) -> Tensor:
        """Return the guided velocity (2N, C, H, W); with `cfg_interval` the conditional
        velocity at times before `cfg_interval_start`. x, t, y: as for
        models.DiT.forward_with_cfg.
        """
        before = cfg_interval is True and t[0] < cfg_interval_start
        return super().forward_with_cfg(x, t, y, 1.0 if before else cfg_scale)
