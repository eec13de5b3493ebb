"""The decoder's passes between two convolutions: biases, residual sum, GroupNorm and SiLU.

GroupNorm: arXiv:1803.08494. Half convolutions want their channels innermost, where torch's
GroupNorm would transpose the picture and back. Here one pass makes the sum and takes both
statistics of each channel, each program over a stretch of pixels. A small kernel joins them to
those of a group: mean and variance of centred values, joined exactly (Chan et al. 1979). One more
pass normalises, applies SiLU and writes the next convolution's input. Sums and statistics are
float32 for any input and output. There are no atomics: the same bits every time.

Triton's kernels take one picture, its channels innermost; the reference any layout.
"""

import torch
from torch import Tensor

from accel.kernels import cuda
from accel.kernels.group_norm import reference
from accel.kernels.group_norm.reference import Sum


def add(
    x: Tensor,
    bias: Tensor,
    branch: Tensor | None = None,
    dtype: torch.dtype | None = None,
    statistics: bool = True,
    backend: str = "auto",
) -> Sum:
    """Return x + branch + bias and the statistics for a GroupNorm.

    x, branch (1, C, H, W): half or float32, channels innermost (channels_last); bias (C,) float32.
    The sum is float32 and is written in `dtype`. Without a dtype (then without branch) x stays as
    it is, and group_norm adds the bias. statistics: False where no norm follows.
    """
    return _run(backend, x).add(x, bias, branch, dtype, statistics)


def group_norm(
    total: Sum,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    silu: bool = True,
    dtype: torch.dtype = torch.float16,
    backend: str = "auto",
) -> Tensor:
    """Apply GroupNorm with ε = 1e-6, then SiLU if asked for.

    Returns (1, C, H, W) in `dtype`, channels innermost. weight, bias (C,) float32.
    """
    return _run(backend, total.value).group_norm(total, weight, bias, groups, silu, dtype)


def _run(backend, x):
    """Return the module that implements a backend."""
    if not cuda.uses_triton("group_norm", backend, x):
        return reference
    from accel.kernels.group_norm import triton

    return triton
