"""Plans: ancestral sampling in strides of several steps, each by one or two network evaluations. The mathematics is in
diffusion/strides.py; scripts/calibrate.py finds plans."""

import hashlib
from itertools import count

import torch

from accel.diffusion import strides
from accel.sampling.process import Process, State


class Strides(strides.Strides, Process):
    """The strides of a plan, the same for every picture and rank."""

    @property
    def setting(self) -> str:
        """What decides the bits of a picture, in words."""
        digest = hashlib.sha256(repr(self.moves).encode()).hexdigest()[:8]
        return f"plan {digest} of {self.evaluations} network evaluations"

    def times(self) -> list[int]:
        return [timestep for _, timestep in self.timesteps()]

    def levels(self) -> list[float]:
        return [time / self.diffusion.original_num_steps for time in self.times()]

    def prepare(self, device) -> None:
        super().prepare(device)
        self._starts(torch.empty(0, device=device).device)

    def begin(self, x) -> State:
        return x, *self.start(x)

    def move(self, kind, state, at, noise, evaluate) -> State:
        x, forecast, values = state
        numbers = count()
        t = self._starts(x.device)[at]  # (n,)
        return self.stride(lambda x, t: evaluate(x, next(numbers)), x, t, forecast, values, noise, kind[1])

    def _starts(self, device):
        """t at the start of the stride of every evaluation, on the device."""
        if device not in self._device_tables:
            with torch.inference_mode(False):  # later callers may be in another mode
                self._device_tables[device] = torch.tensor([t for t, _ in self.timesteps()], device=device)
        return self._device_tables[device]
