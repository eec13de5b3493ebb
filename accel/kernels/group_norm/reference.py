"""The decoder's sum and GroupNorm in plain torch."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6


class Sum(NamedTuple):
    """The result of `add`, the input of `group_norm`."""

    value: Tensor  # (1, C, H, W)
    bias: Tensor | None  # (C,) float32, not yet in `value`
    # (2, chunks, C) float32: mean of each chunk, and sum of squared deviations from it.
    partial: Tensor | None


def add(
    x: Tensor, bias: Tensor, branch: Tensor | None, dtype: torch.dtype | None, statistics: bool
) -> Sum:
    """Compute accel.kernels.group_norm.add; `group_norm` computes the statistics."""
    if dtype is None:
        return Sum(x, bias, None)
    total = x.float() + bias[:, None, None]
    if branch is not None:
        total = total + branch.float()
    return Sum(total.to(dtype), None, None)


def group_norm(
    total: Sum, weight: Tensor, bias: Tensor, groups: int, silu: bool, dtype: torch.dtype
) -> Tensor:
    """Compute accel.kernels.group_norm.group_norm."""
    x = total.value.float()
    if total.bias is not None:
        x = x + total.bias[:, None, None]
    y = F.group_norm(x, groups, weight, bias, EPS)
    if silu:
        y = F.silu(y)
    return y.to(dtype).contiguous(memory_format=torch.channels_last)
