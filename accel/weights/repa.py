"""REPA's weights (Yu et al. 2024, arXiv:2410.06940) as a SiT's.

Its network is SiT's of the other direction: time s = 1 − t runs from data to noise, and the output is noise minus data.
Both can be undone in the weights, exactly but for rounding. The output's sign is the last layer's. Time enters by
cos(f·s) and sin(f·s), which are linear in cos(f·t) and sin(f·t), and the next operation is a linear layer.
"""

import torch
from torch import Tensor

from accel.families.dit.network import TimestepEmbedder

PROJECTORS = "projectors."  # what only training needs: the features that are held against an encoder's


def is_repa(state: dict[str, Tensor]) -> bool:
    """Whether a state dict is of REPA's class."""
    return any(name.startswith(PROJECTORS) for name in state)


def to_sit(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of REPA's class, with projectors or without → of sit.SiT with the same samples."""
    state = {name: value for name, value in state.items() if not name.startswith(PROJECTORS)}
    for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
        if name in state:
            state[name] = -state[name]
    if "t_embedder.mlp.0.weight" in state:
        state["t_embedder.mlp.0.weight"] = _of_time_turned(state["t_embedder.mlp.0.weight"])
    return state


def _of_time_turned(weight: Tensor) -> Tensor:
    """The weight (D, F) that gives a sinusoid of t what `weight` gives that of 1 − t; its own inverse."""
    at_one = TimestepEmbedder.timestep_embedding(torch.ones(1, device=weight.device), weight.shape[1])
    cos, sin = at_one.double().chunk(2, dim=1)  # of the frequencies f, each (1, F/2)
    of_cos, of_sin = weight.double().chunk(2, dim=1)  # each (D, F/2)
    turned = torch.cat([of_cos * cos + of_sin * sin, of_cos * sin - of_sin * cos], dim=1)
    return turned.to(torch.promote_types(weight.dtype, torch.float32))
