"""Guidance intervals (Kynkäänniemi et al. 2024, arXiv:2404.07724) as the originals compare them.

A step may lie on an end of the interval, and then rounding decides whether it is guided. So noise
levels and ends are computed as in the original's script:

    float64 levels           float64 levels from 1 to 0, ends inside
    float32 levels           float32 levels, shifted after rounding, ends inside
    float32 times            float32 times from 0 to 1, ends inside
    float32 times, no ends   the same, ends outside; noise is inside if the interval reaches it

A noise level is 1 − time. `Family.interval_rule` names a family's row.
"""

from math import inf, nextafter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel.families import IntervalRule


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
