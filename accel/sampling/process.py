"""What the denoising loop knows of a process: its moves, the times of their evaluations, and how a move is made."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from accel.network import Network, unpatchify
from accel.sampling.guidance import Guidance, Unguided

Kind = tuple[int, int]  # (steps, network evaluations) of a move
State = tuple[Tensor, ...]  # the latents x (n, C, H, W), and what else a process carries from move to move


class Evaluations:
    """The network at the evaluations of one move.

    evaluate: the network's `tokens`, or its replay. guidance: of each evaluation. at (n,): the index of the first in
    the run; labels (N,): those of the guided rows, whose first n are the conditional ones.
    """

    def __init__(
        self,
        network: Network,
        evaluate: Callable[..., Tensor],
        guidance: tuple[Guidance | Unguided, ...],
        at: Tensor,
        labels: Tensor,
    ):
        self.network, self.evaluate, self.guidance, self.at, self.labels = network, evaluate, guidance, at, labels

    def __call__(self, x: Tensor, number: int = 0) -> Tensor:
        """The move's evaluation `number` at x (n, C, H, W), guided → (n, C', H, W) in x's dtype."""
        out = unpatchify(self.tokens(x, number), self.network.patch_size)
        return self.guidance[number].combine(out).to(x.dtype)

    def tokens(self, x: Tensor, number: int = 0) -> Tensor:
        """The same before guidance and unpatchify, (N, T, p·p·C')."""
        at, copies = self.at + number if number else self.at, self.guidance[number].copies
        return self.evaluate(x, at.repeat(copies), self.labels[: copies * len(x)])


class Process(ABC):
    """A way from noise to latents. Equal by value: what was captured of one serves its equals.

    moves: their kinds, in order. captured: whether a move may be a CUDA graph; else its network evaluations are.
    noise_from_cpu: whether the noise of steps is drawn by the CPU's generator, else by that of the device.
    """

    moves: list[Kind]
    captured, noise_from_cpu = True, False

    @property
    def steps(self) -> int:
        """The steps that all moves make."""
        return sum(steps for steps, _ in self.moves)

    @property
    def draws(self) -> int:
        """How many of the steps draw noise, from the first on. Each later one is handed the last that was drawn."""
        return self.steps

    @property
    def evaluations(self) -> int:
        """Network evaluations of all moves."""
        return sum(count for _, count in self.moves)

    @abstractmethod
    def times(self) -> list[float]:
        """When the network is evaluated, in order, as it takes its t."""

    @abstractmethod
    def levels(self) -> list[float]:
        """The noise level of every evaluation, in order: 0 at the data, 1 at noise."""

    def prepare(self, device: torch.device) -> None:
        """Upload the tables, so that a move can be captured."""
        return None

    def begin(self, x: Tensor) -> State:
        """The state before the first move, from noise x."""
        return (x,)

    @abstractmethod
    def move(self, kind: Kind, state: State, at: Tensor, noise: Tensor, evaluate: Callable[..., Tensor]) -> State:
        """Make one move. at (n,): the index of its first evaluation; noise (steps, n, C, H, W): of each step, of a
        process that draws none (1, 0, …); evaluate: `Evaluations`."""
