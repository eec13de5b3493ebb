"""Recognise the files of REPA's SiT, and convert them to a SiT's (Yu et al. 2024,
arXiv:2410.06940).

REPA's network is a SiT in the other direction: time s = 1 − t runs from data to noise,
and the output is noise minus data. Both can be reversed in the weights, exactly but for
rounding: negate the last layer; cos(f·s) and sin(f·s) are linear in cos(f·t) and
sin(f·t), so the linear layer after the timestep's sinusoid can absorb the change of time.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accel.families import repa
from accel.families.dit.network import TimestepEmbedder
from accel.families.recognise import STRUCTURE, OfModule
from accel.families.repa import PROJECTORS
from accel.families.sit.network import SiT_models
from accel.families.sit.weights import SiTRecogniser, is_sit

PREFIX = "REPA-"  # of our names: REPA's code calls its models as SiT's does
FIRST = "t_embedder.mlp.0.weight"  # (D, F), after the timestep's sinusoid
# What only the classes of REPA's code, and of what derives from it, keep as attributes.
ATTRIBUTES = "path_type", "z_dims", "encoder_depth"


class RepaRecogniser(SiTRecogniser):
    """Recognise weights of REPA's code, with or without its projectors."""

    family = repa.FAMILY
    models = {PREFIX + name: SiT_models[name] for name in SiT_models if "Demo" not in name}

    def sampled(self, state: dict[str, Tensor], metadata: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the entries that sampling needs: all but the projectors."""
        return {name: value for name, value in state.items() if not name.startswith(PROJECTORS)}

    def converted(self, state: dict[str, Tensor], metadata: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the weights of a SiT with the same samples: reverse time and the velocity's
        sign.
        """
        state = self.sampled(state, metadata)
        for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
            if name in state:
                state[name] = -state[name]
        if FIRST in state:
            state[FIRST] = _of_time_turned(state[FIRST])
        return state

    def of_module(self, module: nn.Module, state: dict[str, Tensor]) -> OfModule | None:
        """Return the rules to read a SiT of REPA's code, recognised by its projectors or
        attributes, or None for another module.
        """
        # A module with projectors, or a list of none, returns features beside the velocity.
        with_features = hasattr(module, PROJECTORS.rstrip("."))
        known = with_features or any(hasattr(module, name) for name in ATTRIBUTES)
        if not is_sit(module) or not known or not state.keys() >= {*self.family.keys}:
            return None
        return self.of_entries(
            module,
            state,
            strength=STRUCTURE,
            arguments=lambda x, t, y: ((x, 1 - t, y), {}),
            output=lambda out: -(out[0] if isinstance(out, tuple) else out),
            face=TurnedFace if with_features else TurnedFaceAlone,
        )


RECOGNISER = RepaRecogniser()


def _of_time_turned(weight: Tensor) -> Tensor:
    """Return the weight (D, F) whose product with the sinusoid of t is the product of
    `weight` with that of 1 − t. The conversion is its own inverse.
    """
    at_one = TimestepEmbedder.timestep_embedding(
        torch.ones(1, device=weight.device), weight.shape[1]
    )
    # cos(f) and sin(f) of the frequencies f, each (1, F/2)
    cos, sin = at_one.double().chunk(2, dim=1)
    of_cos, of_sin = weight.double().chunk(2, dim=1)  # each (D, F/2)
    turned = torch.cat([of_cos * cos + of_sin * sin, of_cos * sin - of_sin * cos], dim=1)
    return turned.to(torch.promote_types(weight.dtype, torch.float32))


class TurnedFaceAlone:
    """The signature of a SiT whose time and velocity are reversed, over
    `accelerated.Accelerated`.
    """

    def forward(self, x: Tensor, t: Tensor, y: Tensor, *others: Any, **named: Any) -> Tensor:
        """Return the velocity (N, C, H, W)."""
        return -super().forward(x, 1 - t, y, *others, **named)

    def forward_with_cfg(
        self, x: Tensor, t: Tensor, y: Tensor, cfg_scale: float | Tensor
    ) -> Tensor:
        """Return the guided velocity (2N, C, H, W). Arguments: as for
        models.DiT.forward_with_cfg.
        """
        return -super().forward_with_cfg(x, 1 - t, y, cfg_scale)


class TurnedFace(TurnedFaceAlone):
    """REPA's signature: features come with the velocity."""

    def forward(
        self, x: Tensor, t: Tensor, y: Tensor, *others: Any, **named: Any
    ) -> tuple[Tensor, tuple]:
        """Return (velocity (N, C, H, W), ()): REPA's features are for training."""
        return super().forward(x, t, y, *others, **named), ()
