"""The interface of a process: the times of its network evaluations, and its steps."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

BETAS = np.linspace(0.0001, 0.02, 1000)  # DiT's training schedule, Ho et al. 2020
ABAR = np.cumprod(1 - BETAS)  # ᾱ by timestep
# The latents x (n, C, H, W), then other values that a process passes from step to step.
State = tuple[Any, ...]
Evaluate = Callable[[Tensor], Tensor]  # the guided network: x (n, C, H, W) → (n, C', H, W)


class Process(ABC):
    """A way from noise to latents. Equal processes share captured steps.

    steps: the number of steps. captured: whether a whole step is captured as a CUDA graph, or only
    its network evaluations. noise_from_cpu: whether the noise of the steps is drawn by the CPU's
    generator or by the device's.
    """

    steps: int
    captured = True
    noise_from_cpu = False

    @property
    def evaluation_counts(self) -> list[int]:
        """Return the number of network evaluations of each step, in order."""
        return [1] * self.steps

    @property
    def noise_draws(self) -> int:
        """Return how many steps draw noise: the first ones. Later steps get the last draw again."""
        return self.steps

    @abstractmethod
    def times(self) -> Sequence[float]:
        """Return the network's argument t of every evaluation, in order."""

    def noise_levels(self) -> Sequence[float]:
        """Return the noise level of every evaluation, from 1 (noise) to 0 (data). The default is
        DiT's t / 1000.
        """
        return [time / 1000 for time in self.times()]

    def begin(self, x: Tensor) -> State:
        """Return the state before the first step, from noise x."""
        return (x,)

    def predict_latents(self, x: Tensor, t: float, out: Tensor) -> Tensor:
        """Predict the final latents from x at time t and the network's estimate `out`, each
        (n, C, L, L). The default is for a noise estimate: (x − √(1 − ᾱ_t)·out)/√ᾱ_t.
        """
        abar = ABAR[round(t)]
        latents = (x - (1 - abar) ** 0.5 * out) / abar**0.5
        # Early predictions overshoot, which overflows in a float16 decoder.
        return latents.clamp(-4, 4)

    @abstractmethod
    def step(
        self, state: State, index: Tensor, noise: Tensor, networks: Sequence[Evaluate]
    ) -> State:
        """Make one step.

        index (n,): of the step's first evaluation among all. noise (n, C, H, W), or (0, C, H, W)
        if the process draws none. networks: the guided network, once per evaluation of the step.
        """
