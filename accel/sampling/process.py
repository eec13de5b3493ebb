"""The interface of a process: its steps, the times of their network evaluations, and how
a step is made.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

BETAS = np.linspace(0.0001, 0.02, 1000)  # Ho et al. 2020: of DiT's trained process
ABAR = np.cumprod(1 - BETAS)  # ᾱ by timestep
# the latents x (n, C, H, W), then anything else that a process carries between steps
State = tuple[Any, ...]
Evaluate = Callable[[Tensor], Tensor]  # the guided network: x (n, C, H, W) → (n, C', H, W)


class Process(ABC):
    """A way from noise to latents. Compared by value: a captured step serves all equal
    processes.

    number: of steps. captured: whether a step may be a CUDA graph; else its network evaluations
    are. noise_from_cpu: whether the CPU's generator draws the noise of the steps; else the
    device's does.
    """

    number: int
    captured = True
    noise_from_cpu = False

    @property
    def evaluation_counts(self) -> list[int]:
        """Return the number of network evaluations of each step, in order."""
        return [1] * self.number

    @property
    def steps(self) -> int:
        """Return the number of steps."""
        return self.number

    @property
    def draws(self) -> int:
        """Return the number of steps that draw noise, from the first on. Later steps are
        given the last noise drawn.
        """
        return self.steps

    @property
    def evaluations(self) -> int:
        """Return the number of network evaluations of all steps."""
        return sum(self.evaluation_counts)

    @abstractmethod
    def times(self) -> Sequence[float]:
        """Return the network's argument t at every evaluation, in order."""

    def noise_levels(self) -> Sequence[float]:
        """Return the noise level at every evaluation: 0 at the data, 1 at noise. Here: t
        / 1000, as for DiT.
        """
        return [time / 1000 for time in self.times()]

    def upload_tables(self, device: torch.device) -> None:
        """Upload the tables of coefficients, so that a step can be captured. Here: no-op."""
        return None

    def begin(self, x: Tensor) -> State:
        """Return the state before the first step, from noise x."""
        return (x,)

    def finished(self, x: Tensor, t: float, out: Tensor) -> Tensor:
        """Return the finished latents x* that the network's estimate `out` at time t
        implies for x, (n, C, L, L) each: of noise ε, x* = (x − √(1 − ᾱ)·ε)/√ᾱ.
        """
        kept = ABAR[round(t)]
        latents = (x - (1 - kept) ** 0.5 * out) / kept**0.5
        # from much noise they overshoot, and a decoder in float16 overflows
        return latents.clamp(-4, 4)

    @abstractmethod
    def step(self, state: State, at: Tensor, noise: Tensor, networks: Sequence[Evaluate]) -> State:
        """Make one step. at (n,): the index of its first evaluation. noise: (n, C, H, W),
        (0, C, H, W) if none is drawn. networks: the guided network at each evaluation of
        the step.
        """
