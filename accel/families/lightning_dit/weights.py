"""Recognise the files and modules of a LightningDiT, derive its sizes, and convert its entries."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel.families import lightning_dit
from accel.families.dit.weights import PATCHES, DiTRecogniser
from accel.families.lightning_dit.network import LightningDiT, LightningDiT_models, rotation_table
from accel.families.lightning_dit.recipe import recipe
from accel.families.recognise import STRUCTURE, Fit, OfModule, Recipe
from accel.weights.shapes import Shapes

COS = "feat_rope.freqs_cos"
SIN = "feat_rope.freqs_sin"  # each (T, d), every number twice
MODULATION = ".adaLN_modulation.1."


def swiglu_ratio(shapes: Shapes, width: int) -> float:
    """Return the constructor's `mlp_ratio`: the hidden width is two thirds of a DiT's, rounded
    down.
    """
    hidden = shapes["blocks.0.mlp.w3.weight"][1]
    return (hidden * 3 // 2 + 1.5) / width


class LightningDiTRecogniser(DiTRecogniser):
    """Recognise weights of a LightningDiT. A table of rotations says how wide a head is."""

    family = lightning_dit.FAMILY
    models = LightningDiT_models
    network = LightningDiT

    def form(self, shapes: Shapes, metadata: Mapping[str, Any]) -> Fit:
        """Return the network of weights with these shapes, as Recogniser.form does."""
        width = shapes[PATCHES][0]
        head = shapes[COS][-1]
        if head % 4 or width % head:
            raise ValueError(
                f"{COS} is {shapes[COS]}, which is no table of heads of a width of {width}; save "
                "it again"
            )
        return super().form(shapes, metadata)

    def options(self, shapes: Shapes) -> dict[str, Any]:
        """Return arguments of the constructor that only this family's entries say."""
        width = shapes[PATCHES][0]
        return dict(
            num_heads=width // shapes[COS][-1],
            mlp_ratio=swiglu_ratio(shapes, width),
            qk_norm="blocks.0.attn.q_norm.weight" in shapes,
        )

    def converted(self, state: dict[str, Tensor], metadata: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the state dict of the reference network. The network computes the table of
        rotations, so drop it. Fill modulations of four vectors up to six with zero shifts.
        Raises ValueError for a table of other rotations.
        """
        kept = {name: value for name, value in state.items() if name not in (COS, SIN)}
        if COS in state and not state[COS].is_meta:
            _require_rotations(state)
        for name, value in kept.items():
            of_block = name.startswith("blocks.") and MODULATION in name
            if of_block and len(value) == 4 * len(state[PATCHES]):
                # (2, 2·D, …): scale and gate of attention, then of the MLP
                halves = value.unflatten(0, (2, -1))
                shifts = torch.zeros_like(halves).chunk(2, dim=1)[0]
                kept[name] = torch.cat([shifts, halves], dim=1).flatten(0, 1)
        return kept

    def recipe(self, fit: Fit, metadata: Mapping[str, Any], path: Path) -> Recipe:
        """Return the settings that the configuration in or beside a file implies."""
        return recipe(fit.model, metadata, path)

    def of_module(self, module: nn.Module, state: dict[str, Tensor]) -> OfModule | None:
        """Return the rules to read a module with a LightningDiT's entries, or None for
        another module.
        """
        if not state.keys() >= {*self.family.keys}:
            if any(self.family.name in base.__name__ for base in type(module).__mro__):
                raise ValueError("is a LightningDiT without SwiGLU, which is not computed here")
            return None
        rules = self.of_entries(module, state, strength=STRUCTURE, face=IntervalFace)
        if not isinstance(module, LightningDiT):
            return rules
        # The class here computes its rotations; its state dict has none.
        head = len(state[PATCHES]) // module.num_heads
        table = rotations(head, module.x_embedder.grid_size[0])
        return rules._replace(read=lambda state: {**state, **table})


RECOGNISER = LightningDiTRecogniser()


def _require_rotations(state):
    """Raise ValueError for a file's table of other rotations than are computed."""
    tokens, head = state[COS].shape
    for name, want in rotations(head, round(tokens**0.5)).items():
        same_shape = want.shape == state[name].shape
        if not same_shape or (state[name].cpu().float() - want).abs().amax() > 0.02:
            raise ValueError(
                f"{name} has other rotations than those by row and column that are computed here"
            )


def rotations(head: int, side: int) -> dict[str, Tensor]:
    """Return a file's entries for heads of `head` channels on side² tokens."""
    # (T, d, 2)
    table = rotation_table(head, side, torch.float32, "cpu").repeat_interleave(2, dim=1)
    return dict(zip((COS, SIN), table.unbind(-1)))


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
