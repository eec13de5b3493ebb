"""Autoguidance (Karras et al. 2024, arXiv:2406.02507): a second network's estimate in place of
the null label's.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from accel.runtime.network import BlockNetwork, Network, RunState


class GuidedRun(NamedTuple):
    """The states of a run's network and guide. Equal runs have both equal."""

    network: RunState
    guide: RunState

    def advance(self, index: int, *more: int) -> None:
        """Make the conditioning of these evaluations ready for both."""
        self.network.advance(index, *more)
        self.guide.advance(index, *more)


class WithGuide(Network[GuidedRun]):
    """A network f and its guide g: of 2n batch rows of n latents f evaluates the first n and g
    the others, of n rows f evaluates all.

    A captured step holds both networks, and f keeps it.
    """

    weights_label = "the weights of `ckpt` and `guide`"

    def __init__(self, network: BlockNetwork, guide: BlockNetwork):
        self.network = network
        self.guide = guide
        self.in_channels = network.in_channels
        self.captures = network.captures and guide.captures

    @torch.no_grad()
    def forward(self, x: Tensor, t: Tensor, y: Tensor, run: GuidedRun | None = None) -> Tensor:
        n = len(x)
        of_network, of_guide = run or (None, None)
        out = self.network.forward(x, t[:n], y[:n], of_network)
        if len(y) == n:
            return out
        return torch.cat([out, self.guide.forward(x, t[n:], y[n:], of_guide)])

    def prepare(self, times: list[float], labels: list[int], at_once: int = 1) -> GuidedRun:
        return GuidedRun(
            self.network.prepare(times, labels, at_once),
            self.guide.prepare(times, labels, at_once),
        )

    def graphed(self, key: Hashable, step: Callable) -> Callable:
        return self.network.graphed(key, step)

    @property
    def parts(self) -> list[BlockNetwork]:
        return [self.network, self.guide]

    def overflowed(self) -> str | None:
        return self.network.overflowed() or self.guide.overflowed()
