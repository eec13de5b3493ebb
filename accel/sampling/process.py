"""The interface of a process: its moves, the times of their network evaluations, and how
a move is made.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from accel.diffusion import create_diffusion

Kind = tuple[int, int]  # (steps, network evaluations) of a move
# the latents x (n, C, H, W), then anything else that a process carries between moves
State = tuple[Tensor, ...]


class Process(ABC):
    """A way from noise to latents. Compared by value: a captured move serves all equal
    processes.

    moves: their kinds, in order. captured: whether a move may be a CUDA graph; else its
    network evaluations are. noise_from_cpu: whether the CPU's generator draws the noise
    of the steps; else the device's does.
    """

    moves: list[Kind]
    captured = True
    noise_from_cpu = False

    @property
    def steps(self) -> int:
        """Return the number of steps of all moves."""
        return sum(steps for steps, _ in self.moves)

    @property
    def draws(self) -> int:
        """Return the number of steps that draw noise, from the first on. Later steps are
        given the last noise drawn.
        """
        return self.steps

    @property
    def evaluations(self) -> int:
        """Return the number of network evaluations of all moves."""
        return sum(count for _, count in self.moves)

    @abstractmethod
    def times(self) -> list[float]:
        """Return the network's argument t at every evaluation, in order."""

    def levels(self) -> list[float]:
        """Return the noise level at every evaluation: 0 at the data, 1 at noise. Here: t
        / 1000, as for DiT.
        """
        return [time / 1000 for time in self.times()]

    def prepare(self, device: torch.device) -> None:
        """Upload the tables, so that a move can be captured."""
        return None

    def begin(self, x: Tensor) -> State:
        """Return the state before the first move, from noise x."""
        return (x,)

    def finished(self, x: Tensor, t: float, out: Tensor) -> Tensor:
        """Return the finished latents x* that the network's estimate `out` at time t
        implies for x, (n, C, L, L) each: of noise ε, x* = (x − √(1 − ᾱ)·ε)/√ᾱ.
        """
        kept = create_diffusion("").alphas_cumprod[round(t)]
        latents = (x - (1 - kept) ** 0.5 * out) / kept**0.5
        # from much noise they overshoot, and a decoder in float16 overflows
        return latents.clamp(-4, 4)

    @abstractmethod
    def move(
        self, kind: Kind, state: State, at: Tensor, noise: Tensor, evaluate: Callable[..., Tensor]
    ) -> State:
        """Make one move. at (n,): the index of its first evaluation; noise (steps, n, C,
        H, W): of each step, (1, 0, …) if none is drawn; evaluate(x, number=0): the guided
        network at the `number`-th evaluation of the move.
        """
