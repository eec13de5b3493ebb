"""The sine-cosine table of positions, which networks compute and many files hold too."""

import math

import numpy as np
import torch

from accel.errors import Mistake

POSITION_TABLE = "pos_embed"  # its name in a state dict
# A moving average of a fixed table rounds at each step: with a decay of 0.9999 the errors
# of 10,000 float32 roundings add up to at most 6e-4 of a value near one.
AVERAGING_ERROR = 6e-4


def sine_cosine(side: int, width: int) -> np.ndarray:
    """Return the table of a square grid in raster order, (1, side², width) float64.

    Half the width is for the column, then half for the row; in each half sines come before
    cosines, of position·10000^(-4i/width).
    """
    frequencies = 10000.0 ** -(np.arange(width // 4, dtype=np.float64) / (width / 4))
    angles = np.outer(np.arange(side), frequencies)  # (side, width/4)
    axis = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)  # (side, width/2)
    columns = np.tile(axis, (side, 1))
    rows = np.repeat(axis, side, axis=0)
    return np.concatenate([columns, rows], axis=1)[None]


def distance(table: torch.Tensor) -> float:
    """Return the largest difference of a table from the sine-cosine table of its grid, in
    float32.

    It is infinite for a shape that no such table has, and for a table that is not finite.
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
    """Return the distance that rounding alone explains, of an average or of a dtype."""
    return max(AVERAGING_ERROR, torch.finfo(table.dtype).eps)


def require_sinusoid(error: Mistake, table: torch.Tensor, remedy: str) -> None:
    """Raise `error`, with `remedy`, if a position table (1, T, D) is further from the
    sine-cosine table of its grid than a moving average's rounding: a table that was trained is
    no function of the grid.
    """
    off = distance(table)
    allowed = rounding(table)
    if off > allowed:
        raise error(
            f"its position table is up to {off:.2g} off the sine-cosine table of its grid, more "
            f"than the rounding of an average ({allowed:.1g})",
            remedy,
        )


def trained(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict without its position table, if that is the sine-cosine table of
    its grid but for rounding.
    """
    table = state.get(POSITION_TABLE)
    if table is None or distance(table) > rounding(table):
        return state
    return {name: tensor for name, tensor in state.items() if name != POSITION_TABLE}
