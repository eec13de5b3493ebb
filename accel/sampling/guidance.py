"""Guidance: the network's outputs for all batch rows of a latent → one estimate.

A guidance is a value. It defines how many batch rows share a latent (`copies`), how many of
them a network evaluates (`rows`), how many rows of noise a step draws for a latent (`drawn`),
the labels of the batch rows, and how their outputs are combined.
`guidance_of` chooses it.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

CHANNELS = 3  # of the noise estimate's four, as for the published pictures


def guided(out: Tensor, scale: float | Tensor, channels: int = CHANNELS) -> Tensor:
    """Guide without a classifier (Ho & Salimans 2022, arXiv:2207.12598): uncond + scale ·
    (cond − uncond) on the first `channels` channels. out (2n, C', H, W), the conditional
    rows first → (n, channels, H, W).
    """
    cond, uncond = out[:, :channels].chunk(2)
    return uncond + scale * (cond - uncond)


def guided_halves(out: Tensor, scale: float | Tensor, channels: int) -> Tensor:
    """Guide as models.DiT.forward_with_cfg does: both halves of out (2n, C', H, W) get the guided
    channels, and keep the others → (2n, C', H, W).
    """
    eps = guided(out, scale, channels)
    return torch.cat([torch.cat([eps, eps]), out[:, channels:]], dim=1)


@dataclass(frozen=True)
class Unguided:
    """The class-conditional estimate alone: one batch row a latent.

    drawn: rows of a step's noise that are drawn for a latent; one is used.
    """

    copies: ClassVar[int] = 1
    rows: ClassVar[int] = 1
    scale: ClassVar[float] = 1.0
    drawn: int = 1

    def at(self, level: float) -> "Unguided":
        """Return the guidance of an evaluation at a noise level, from 0 at the data to 1
        at noise.
        """
        return self

    def labels(self, y: Tensor) -> Tensor:
        """Return the labels of the batch rows (N,) for labels y (n,)."""
        return y

    def rule(self) -> "Unguided":
        """Return the guidance without the numbers that do not change a captured step: those that
        choose it, and the scale, which is an argument of `combine`.
        """
        return Unguided()

    def combine(self, out: Tensor, scale: float | Tensor) -> Tensor:
        """Combine the outputs for the batch rows (N, C', H, W) → estimates for the
        latents (n, C', H, W).
        """
        return out


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance by `scale` on the first `channels` channels; the others
    are the conditional row's.

    interval: the least and the greatest noise level at which it acts
    (accel/sampling/intervals.py). At other levels only the conditional rows are evaluated.
    """

    copies: ClassVar[int] = 2
    rows: ClassVar[int] = 2
    drawn: ClassVar[int] = 2
    scale: float
    null_label: int
    channels: int = CHANNELS
    interval: tuple[float, float] = (0.0, 1.0)

    def at(self, level: float) -> "Guidance | Unguided":
        low, high = self.interval
        return self if low <= level <= high else Unguided()

    def labels(self, y: Tensor) -> Tensor:
        return torch.cat([y, torch.full_like(y, self.null_label)])

    def rule(self) -> "Guidance":
        return replace(self, scale=1.0, interval=(0.0, 1.0))

    def combine(self, out: Tensor, scale: float | Tensor) -> Tensor:
        rest = out[: len(out) // 2, self.channels :]
        return torch.cat([guided(out, scale, self.channels), rest], dim=1)


@dataclass(frozen=True)
class Autoguidance(Guidance):
    """Guidance of a network f by a second g (Karras et al. 2024, arXiv:2406.02507), usually smaller
    or less trained: g + scale · (f − g) on the first `channels` channels, both of the same label;
    the others are f's. accel/sampling/autoguidance.py evaluates both.

    At levels outside the interval f alone is evaluated.
    """

    rows: ClassVar[int] = 1
    null_label: int = field(default=-1, init=False)  # there is none

    def labels(self, y: Tensor) -> Tensor:
        return torch.cat([y, y])


def guidance_of(
    scale: float,
    null_label: int | None,
    *,
    guide: bool = False,
    channels: int = CHANNELS,
    interval: tuple[float, float] = (0.0, 1.0),
    is_fid_job: bool = False,
) -> Guidance | Unguided:
    """Return the guidance of a run: none at a scale of 1, where one row a latent is evaluated.

    null_label: the label of no class, None without one. guide: whether a second network gives the
    other estimate, which is used above a scale of 1 alone. is_fid_job: whether a run without
    guidance draws a row of noise a latent, as upstream's FID jobs do. Its other runs always draw
    those of guidance.
    """
    if guide and scale > 1:
        return Autoguidance(scale, channels, interval)
    if guide or null_label is None or scale == 1:
        always_two = (guide or null_label is not None) and not is_fid_job
        return Unguided(drawn=2 if always_two else 1)
    return Guidance(scale, null_label, channels, interval)
