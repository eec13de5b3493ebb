"""Other implementations of a network for the same weights and loop: eager, torch.compile."""

import copy
from collections.abc import Callable

import torch

from accel.network import Network, Plain

RIVALS = {  # name of --vs → name of the rung
    "eager": "eager",
    "compile": "torch.compile default",
    "max-autotune": "torch.compile max-autotune",
}


class Rival(Plain):
    """A plain network in `dtype` under one of RIVALS. `model` is converted to that dtype;
    eager runs under autocast.
    """

    def __init__(self, what: str, model: torch.nn.Module, dtype: torch.dtype, device: torch.device):
        super().__init__(model.to(dtype))
        self.dtype = dtype
        evaluate = super().tokens
        if what == "eager":
            autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
            self.evaluate = autocast(evaluate)
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
