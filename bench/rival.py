"""Other implementations of a network for the same weights and loop: eager, torch.compile."""

import copy
from collections.abc import Callable

import torch

from accel.graphs import Replayed
from accel.network import Network, Plain

RIVALS = {  # name of --vs → name of the rung
    "eager": "eager",
    "compile": "torch.compile default",
    "max-autotune": "torch.compile max-autotune",
}
# parameters above which the compiler would be busy with the whole network for many
# minutes
LARGE = 10**9


class Rival(Plain):
    """A plain network in `dtype` under one of RIVALS. `model` is converted to that dtype;
    eager runs under autocast.

    A LARGE network's blocks are compiled one by one and share a compilation; a CUDA graph
    then holds a step.
    """

    def __init__(self, what: str, model: torch.nn.Module, dtype: torch.dtype, device: torch.device):
        super().__init__(model.to(dtype))
        evaluate = super().tokens
        if what == "eager":
            autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
            self.evaluate = autocast(evaluate)
        elif sum(value.numel() for value in model.parameters()) > LARGE:
            for block in model.blocks:
                block.compile(mode="max-autotune-no-cudagraphs", dynamic=False)
            self.evaluate = Replayed(evaluate)
        else:
            mode = "default" if what == "compile" else what
            self.evaluate = torch.compile(evaluate, mode=mode, dynamic=False)

    def tokens(self, x, t, y) -> torch.Tensor:
        # the compiler's graph will overwrite it
        return self.evaluate(x.to(self.dtype), t, y).to(x.dtype, copy=True)

    def schedule(self, times, labels, at_once=1) -> tuple[Network, Callable[..., None]]:
        table = torch.tensor(times, device=next(self.parameters()).device)
        network = copy.copy(self)
        network.tokens = lambda x, index, y: self.tokens(x, table[index], y)
        return network, lambda *evaluations: None
