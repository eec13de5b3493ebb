"""Guidance: a network's outputs for all batch rows of a latent → its estimate.

A guidance is a value: it says how many batch rows share a latent (`copies`), which labels they have, and what becomes
of their outputs. `scale` and `channels` are what kernels need to do the same at the end of a step.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

CHANNELS = 3  # of the noise estimate, not all four: the published pictures were made so


def guided(out: Tensor, scale: float | Tensor, channels: int = CHANNELS) -> Tensor:
    """Classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598): uncond + scale · (cond − uncond) on the first
    `channels` channels. out (2n, C', H, W), the conditional rows first → (n, channels, H, W)."""
    cond, uncond = out[:, :channels].chunk(2)
    return uncond + scale * (cond - uncond)


@dataclass(frozen=True)
class Unguided:
    """The class-conditional estimate alone: a batch row a latent."""

    copies: ClassVar[int] = 1
    scale: ClassVar[float] = 1.0
    channels: ClassVar[int] = 0

    def at(self, level: float) -> "Unguided":
        """The guidance of an evaluation at a noise level, from 0 at the data to 1 at noise."""
        return self

    def labels(self, y: Tensor) -> Tensor:
        """Labels y (n,) → of the batch rows (N,)."""
        return y

    def combine(self, out: Tensor) -> Tensor:
        """Outputs of the batch rows (N, C', H, W) → of the latents (n, C', H, W)."""
        return out


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance by `scale` on the first `channels` channels; the others are the conditional row's.

    interval: the noise levels, from 0 at the data to 1 at noise, at which it acts (Kynkäänniemi et al. 2024,
    arXiv:2404.07724). At others the conditional rows alone are evaluated.
    """

    copies: ClassVar[int] = 2
    scale: float
    null_label: int
    channels: int = CHANNELS
    interval: tuple[float, float] = (0.0, 1.0)

    def at(self, level: float) -> "Guidance | Unguided":
        """The guidance of an evaluation at a noise level."""
        low, high = self.interval
        return self if low <= level <= high else Unguided()

    def labels(self, y: Tensor) -> Tensor:
        """Labels y (n,) → of the batch rows (2n,): those with the null label last."""
        return torch.cat([y, torch.full_like(y, self.null_label)])

    def combine(self, out: Tensor) -> Tensor:
        """Outputs of the batch rows (2n, C', H, W) → of the latents (n, C', H, W)."""
        rest = out[: len(out) // 2, self.channels :]
        return torch.cat([guided(out, self.scale, self.channels), rest], dim=1)
