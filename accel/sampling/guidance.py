"""Guidance combines the network's outputs for all batch rows of a latent into one estimate.

A guidance is a value with equality. Per latent it has `copies` batch rows, of which each network
evaluates `network_rows`, and every step draws `noise_rows` rows of noise. It makes the labels of
the batch rows and combines their outputs. `guidance_of` chooses it.

A guidance interval (Kynkäänniemi et al. 2024, arXiv:2404.07724) may end at an evaluation's noise
level, and then rounding decides whether that evaluation is guided. So levels and ends are rounded
as in each original (`Family.interval_rule`):

    float64 levels           float64 levels from 1 to 0, ends inside
    float32 levels           float32 levels, shifted after rounding, ends inside
    float32 times            float32 times from 0 to 1, ends inside
    float32 times, no ends   the same, ends outside; noise is inside if the interval reaches it

A noise level is 1 − time.
"""

from dataclasses import dataclass, field, replace
from math import inf, nextafter
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from accel.families import IntervalRule

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

    interval: the least and the greatest noise level at which it acts. At other levels only the
    conditional rows are evaluated.
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


# ---- Intervals ----


def shifted(t: Any, shift: float) -> Any:
    """Shift a time, or times in the arithmetic of their dtype."""
    return shift * t / (1 + (shift - 1) * t)


def step_levels(rule: IntervalRule, steps: int, last_time: float, shift: float) -> Tensor:
    """Return the noise levels at the ends of all steps, (steps + 1,), from 1 down.

    last_time: the end of the even times. shift: of the times; levels are shifted by 1/shift.
    """
    if rule == "float64 levels":
        even = torch.linspace(1, 1 - last_time, steps + 1, dtype=torch.float64)
        return shifted(even, 1 / shift)
    even = torch.linspace(0, last_time, steps + 1, dtype=torch.float32)
    if rule == "float32 levels":
        return shifted(1 - even, 1 / shift)
    return 1 - shifted(even, shift).double()


def closed_interval(rule: IntervalRule, interval: tuple[float, float]) -> tuple[float, float]:
    """Return the least and the greatest noise level of an interval under a rule."""
    if rule == "float64 levels":
        return interval
    if rule == "float32 levels":
        low, high = (float(np.float32(end)) for end in interval)
        return low, high
    low, high = (1 - float(np.float32(1 - end)) for end in interval)
    if rule == "float32 times":
        return low, high
    return nextafter(low, inf), high if high == 1 else nextafter(high, -inf)
