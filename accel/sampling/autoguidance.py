"""Autoguidance (Karras et al. 2024, arXiv:2406.02507): a second network replaces the null label."""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from accel.runtime.network import BlockNetwork, Network, RunState


class GuidedRun(NamedTuple):
    """The run states of a network and its guide."""

    network: RunState
    guide: RunState

    def advance(self, index: int, *more: int) -> None:
        """Prepare the conditioning of these evaluations in both networks."""
        self.network.advance(index, *more)
        self.guide.advance(index, *more)


class WithGuide(Network[GuidedRun]):
    """A network f and its guide g. Of 2n batch rows f evaluates the first half and g the second;
    of n rows f evaluates all.

    A captured step contains both networks and is stored with f.
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
        network_run, guide_run = run or (None, None)
        out = self.network.forward(x, t[:n], y[:n], network_run)
        if len(y) == n:
            return out
        return torch.cat([out, self.guide.forward(x, t[n:], y[n:], guide_run)])

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
