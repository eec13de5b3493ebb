"""Guidance combines the network's outputs for all batch rows of a latent into one estimate.

A guidance is a value with equality. Per latent it has `copies` batch rows, of which each network
evaluates `network_rows`, and every step draws `noise_rows` rows of noise. It makes the labels of
the batch rows and combines their outputs. `guidance_of` chooses it.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

CHANNELS = 3  # guided channels: three of the noise estimate's four, as in the published pictures


def guided(out: Tensor, scale: float | Tensor, channels: int = CHANNELS) -> Tensor:
    """Return uncond + scale · (cond − uncond) of the first `channels` channels: classifier-free
    guidance (Ho & Salimans 2022, arXiv:2207.12598).

    out (2n, C', H, W), the conditional rows first → (n, channels, H, W).
    """
    cond, uncond = out[:, :channels].chunk(2)
    return uncond + scale * (cond - uncond)


def guided_halves(out: Tensor, scale: float | Tensor, channels: int) -> Tensor:
    """Guide both halves of out (2n, C', H, W) as models.DiT.forward_with_cfg does → (2n, C', H, W).

    Channels after the first `channels` are unchanged.
    """
    eps = guided(out, scale, channels)
    return torch.cat([torch.cat([eps, eps]), out[:, channels:]], dim=1)


@dataclass(frozen=True)
class Unguided:
    """The class-conditional estimate without guidance: one batch row per latent.

    noise_rows: rows of noise that a step draws per latent; only one is used.
    """

    copies: ClassVar[int] = 1
    network_rows: ClassVar[int] = 1
    scale: ClassVar[float] = 1.0
    noise_rows: int = 1

    def at(self, level: float) -> "Unguided":
        """Return the guidance of an evaluation at a noise level: 0 is data, 1 is noise."""
        return self

    def labels(self, y: Tensor) -> Tensor:
        """Return the labels of the batch rows (N,) for labels y (n,)."""
        return y

    def rule(self) -> "Unguided":
        """Return the part of the guidance that a captured step depends on. The interval chooses
        between steps, and the scale is an argument of `combine`.
        """
        return Unguided()

    def combine(self, out: Tensor, scale: float | Tensor) -> Tensor:
        """Combine the outputs of the batch rows (N, C', H, W) into estimates of the latents
        (n, C', H, W).
        """
        return out


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance by `scale` on the first `channels` channels. The remaining channels
    are the conditional row's.

    interval: the least and the greatest noise level at which it acts
    (accel/sampling/intervals.py). At other levels only the conditional rows are evaluated.
    """

    copies: ClassVar[int] = 2
    network_rows: ClassVar[int] = 2
    noise_rows: ClassVar[int] = 2
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
    """Guidance of a network f by a smaller or less trained network g with the same label (Karras et
    al. 2024, arXiv:2406.02507): g + scale · (f − g) on the first `channels` channels. The remaining
    channels are f's. accel/sampling/autoguidance.py evaluates both networks.

    At noise levels outside the interval only f is evaluated.
    """

    network_rows: ClassVar[int] = 1
    null_label: int = field(default=-1, init=False)  # not used

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
    """Return the guidance of a run, `Unguided` at a scale of 1.

    null_label: None if the network has none. guide: whether a second network guides, which it does
    only at scales above 1. is_fid_job: upstream's FID job draws one row of noise per latent without
    guidance; its grids always draw two.
    """
    if guide and scale > 1:
        return Autoguidance(scale, channels, interval)
    if guide or null_label is None or scale == 1:
        always_two = (guide or null_label is not None) and not is_fid_job
        return Unguided(noise_rows=2 if always_two else 1)
    return Guidance(scale, null_label, channels, interval)
