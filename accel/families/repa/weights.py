"""Recognise the files of REPA's SiT, and convert them to a SiT's (Yu et al. 2024,
arXiv:2410.06940).

REPA's network is a SiT in the other direction: time s = 1 − t runs from data to noise,
and the output is noise minus data. Both can be reversed in the weights, exactly but for
rounding: negate the last layer; cos(f·s) and sin(f·s) are linear in cos(f·t) and
sin(f·t), so the linear layer after the timestep's sinusoid can absorb the change of time.
"""

from typing import Any

import torch
from torch import Tensor, nn

from accel.families import repa
from accel.families.dit.network import TimestepEmbedder
from accel.families.dit.weights import KEYS, LABELS, of_dit, sizes_of
from accel.families.loaded_module import OfModule
from accel.families.recognise import STRUCTURE, Sizes
from accel.families.sit.network import SiT, SiT_models
from accel.families.sit.weights import is_sit, require_computable
from accel.weights.shapes import Shapes

__all__ = ["KEYS", "LABELS", "MODELS", "claim", "converted", "of_module", "sampled", "sizes"]
MODELS = {
    name.replace("SiT", "REPA-SiT", 1): SiT_models[name]
    for name in SiT_models
    if "Demo" not in name
}
PROJECTORS = "projectors."  # training compares their outputs with an encoder's features
ARGUMENT = "enc_type"  # only REPA's training has this argument


def claim(shapes: Shapes, metadata: dict[str, Any]) -> tuple[int, str] | None:
    """Return a claim if there are projectors or an argument of REPA's training, else None."""
    if any(name.startswith(PROJECTORS) for name in shapes):
        return STRUCTURE, "projectors"
    return (STRUCTURE, ARGUMENT) if ARGUMENT in metadata else None


def sizes(shapes: Shapes, metadata: dict[str, Any]) -> Sizes:
    """Return (name, constructor, heads) of the model with weights of these shapes, as
    families/recognise.py asks.
    """
    require_computable(metadata)
    return sizes_of(shapes, metadata.get("num_heads"), SiT, repa.FAMILY.name, MODELS)


def sampled(state: dict[str, Tensor], metadata: dict[str, Any]) -> dict[str, Tensor]:
    """Return the entries that sampling needs: all but the projectors."""
    return {name: value for name, value in state.items() if not name.startswith(PROJECTORS)}


def converted(state: dict[str, Tensor], metadata: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a SiT with the same samples: reverse time and the velocity's sign."""
    state = sampled(state, metadata)
    for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
        if name in state:
            state[name] = -state[name]
    if "t_embedder.mlp.0.weight" in state:
        state["t_embedder.mlp.0.weight"] = _of_time_turned(state["t_embedder.mlp.0.weight"])
    return state


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


def of_module(module: nn.Module, state: dict[str, Tensor]) -> OfModule | None:
    """Return the rules to read REPA's SiT, recognised by its projectors, or None for
    another module.
    """
    if not is_sit(module) or not any(name.startswith(PROJECTORS) for name in state):
        return None
    turned = dict(
        arguments=lambda x, t, y: ((x, 1 - t, y), {}), output=lambda out: -out[0], face=TurnedFace
    )
    return of_dit(repa.FAMILY, module, state, strength=STRUCTURE, **turned)


class TurnedFace:
    """REPA's signature over `accelerated.Accelerated`: time and velocity are reversed."""

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> tuple[Tensor, tuple]:
        """Return (velocity (N, C, H, W), ()): REPA's features are for training."""
        return -super().forward(x, 1 - t, y), ()

    def forward_with_cfg(
        self, x: Tensor, t: Tensor, y: Tensor, cfg_scale: float | Tensor
    ) -> Tensor:
        """Return the guided velocity (2N, C, H, W). Arguments: as for
        models.DiT.forward_with_cfg.
        """
        return -super().forward_with_cfg(x, 1 - t, y, cfg_scale)
