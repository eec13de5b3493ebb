"""Tables that checkpoints contain next to the trained weights: sine-cosine positions, which
networks compute, and per-channel statistics of latents, under the training programs' names.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from accel.errors import InputRef

POSITION_TABLE = "pos_embed"  # in a state dict
# The moving average of a constant table rounds at each step. With a decay of 0.9999, the float32
# errors of 10,000 steps add up to at most 6e-4 for values near one.
AVERAGING_ERROR = 6e-4
MEAN_AND_VARIANCE = "bn.running_mean", "bn.running_var"
BIAS_AND_SCALE = "latents_bias", "latents_scale"  # mean and inverse std
PAIRS = MEAN_AND_VARIANCE, BIAS_AND_SCALE


def sine_cosine(side: int, width: int) -> np.ndarray:
    """Compute the table of a square grid in raster order, (1, side², width) float64.

    The first half of the width encodes the column, the second half the row: sines, then cosines,
    of position · 10000^(−4i/width).
    """
    frequencies = 10000.0 ** -(np.arange(width // 4, dtype=np.float64) / (width / 4))
    angles = np.outer(np.arange(side), frequencies)  # (side, width/4)
    axis = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)  # (side, width/2)
    columns = np.tile(axis, (side, 1))
    rows = np.repeat(axis, side, axis=0)
    return np.concatenate([columns, rows], axis=1)[None]


def distance(table: torch.Tensor) -> float:
    """Return the largest float32 difference from the sine-cosine table of the same grid; infinite
    for another shape and for values that are not finite.
    """
    if table.ndim != 3:
        return math.inf
    side = math.isqrt(table.shape[1])
    want = torch.from_numpy(sine_cosine(side, table.shape[2])).float()
    if want.shape != table.shape:
        return math.inf
    difference = (table.detach().cpu().float() - want).abs().max().item()
    return math.inf if math.isnan(difference) else difference


def rounding(table: torch.Tensor) -> float:
    """Return the largest distance that averaging or the dtype's rounding can cause."""
    return max(AVERAGING_ERROR, torch.finfo(table.dtype).eps)


def require_sinusoid(given: InputRef, table: torch.Tensor, remedy: str) -> None:
    """Raise UsageError with `remedy` if a position table (1, T, D) was trained: such a table cannot
    be computed for another grid.
    """
    off = distance(table)
    allowed = rounding(table)
    if off > allowed:
        raise given.error(
            f"its position table differs by up to {off:.2g} from the sine-cosine table, more than "
            f"rounding explains ({allowed:.1g})",
            remedy,
        )


def trained(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Drop the position table from a state dict if it is, up to rounding, the sine-cosine table."""
    table = state.get(POSITION_TABLE)
    if table is None or distance(table) > rounding(table):
        return state
    return {name: tensor for name, tensor in state.items() if name != POSITION_TABLE}


def mean_and_deviation(content: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return mean and std of the first pair that a checkpoint contains, or None. Shapes and dtypes
    are unchanged.
    """
    for pair in PAIRS:
        if all(isinstance(content.get(name), torch.Tensor) for name in pair):
            mean, spread = (content[name] for name in pair)
            return mean, 1 / spread if pair == BIAS_AND_SCALE else spread.sqrt()
    return None
