"""The accelerated SiT: the accelerated DiT, whose last layer computes the velocity alone."""

from typing import Any

import torch

from accel.fast import dit


def build(state: dict[str, torch.Tensor], model: torch.nn.Module, *how: Any, **named: Any) -> dit.FastDiT:
    """As dit.build; the rows of the last layer whose channels sit.SiT drops are not computed."""
    last = {name: state[name] for name in ("final_layer.linear.weight", "final_layer.linear.bias")}
    for name, value in last.items():  # (p·p·C', …); inside a token the order is (p, p, C')
        last[name] = value.unflatten(0, (-1, model.out_channels))[:, : model.in_channels].flatten(0, 1)
    return dit.build({**state, **last}, model, *how, **named)
