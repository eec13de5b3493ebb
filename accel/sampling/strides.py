"""Plans: ancestral sampling by strides of several steps, with one or two network
evaluations each. diffusion/strides.py has the mathematics; scripts/calibrate.py finds
plans.
"""

import hashlib
from itertools import count

import torch

from accel.diffusion import strides
from accel.sampling.process import Process, State


class Strides(strides.Strides, Process):
    """The strides of a plan; the same for every picture and rank."""

    @property
    def setting(self) -> str:
        """Return a description that only an equal plan shares; an FID folder keeps it."""
        digest = hashlib.sha256(repr(self.moves).encode()).hexdigest()[:8]
        return f"plan {digest} of {self.evaluations} network evaluations"

    def begin(self, x) -> State:
        last = self.diffusion.num_timesteps - 1
        return x, *self.start(x), torch.full((len(x),), last, device=x.device)

    def move(self, kind, state, at, noise, evaluate) -> State:
        (x, forecast, values, t) = state
        numbers = count()  # t (n,): where the stride starts
        stepped = self.stride(
            lambda x, t: evaluate(x, next(numbers)), x, t, forecast, values, noise, kind[1]
        )
        return *stepped, t - kind[0]
