"""Autoguidance (Karras et al. 2024, arXiv:2406.02507): a second network's estimate in place of
the null label's.
"""

import copy
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from accel.network import BlockNetwork, Network, Scheduled
from accel.sampling.guidance import Guidance


@dataclass(frozen=True)
class Autoguidance(Guidance):
    """Guidance of a network f by a second g, usually smaller or less trained: g + scale · (f − g)
    on the first `channels` channels, both of the same label; the others are f's.

    At levels outside the interval f alone is evaluated.
    """

    rows: ClassVar[int] = 1
    null_label: int = field(default=-1, init=False)  # there is none

    def labels(self, y: Tensor) -> Tensor:
        return torch.cat([y, y])


class WithGuide(Network):
    """A network f and its guide g: of 2n batch rows of n latents f evaluates the first n and g
    the others, of n rows f evaluates all.

    A captured step holds both networks.
    """

    of_files = "the weights of `ckpt` and `guide`"

    def __init__(self, network: BlockNetwork, guide: BlockNetwork):
        super().__init__()
        self.network = network
        self.guide = guide
        self.in_channels = network.in_channels
        self.captures = network.captures and guide.captures
        # A network drops its graphs when it replaces the table that they read: either drops all.
        self._replayed = guide._replayed = network._replayed

    @torch.no_grad()
    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        n = len(x)
        out = self.network.forward(x, t[:n], y[:n])
        if len(y) == n:
            return out
        return torch.cat([out, self.guide.forward(x, t[n:], y[n:])])

    def schedule(self, times: list[float], labels: list[int], at_once: int = 1) -> Scheduled:
        network = self.network.schedule(times, labels, at_once)
        guide = self.guide.schedule(times, labels, at_once)
        scheduled = copy.copy(self)
        vars(scheduled).update(network=network.network, guide=guide.network)

        def advance(*evaluations):
            network.advance(*evaluations)
            guide.advance(*evaluations)

        return Scheduled(scheduled, advance)

    def copy_weights(self, other: BlockNetwork) -> None:
        """Copy the weights of a network like f in place; the guide keeps its own."""
        self.network.copy_weights(other)

    def overflowed(self) -> str | None:
        return self.network.overflowed() or self.guide.overflowed()
