"""The operations between two convolutions of a decoder: bias, residual sum, GroupNorm and SiLU.

GroupNorm: Wu & He 2018, arXiv:1803.08494. Half-precision convolutions are fastest in channels_last,
but torch's GroupNorm would transpose its input and output. Here one pass computes the sum and the
statistics of each channel; a program covers a chunk of pixels. A small kernel combines them to mean
and variance of each group (Chan et al. 1979). A second pass normalises, applies SiLU and writes the
next convolution's input. Sums and statistics are float32 for all dtypes. There are no atomics, so
the bits are reproducible.

The Triton kernels take one picture in channels_last; the reference takes any layout.
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

    x, branch (1, C, H, W): half or float32, channels_last; bias (C,) float32. The sum is computed
    in float32 and written in `dtype`. Without a dtype there must be no branch; then x is not
    written, and group_norm adds the bias. statistics: False if no norm follows.
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
    """Apply GroupNorm with ε = 1e-6, then optionally SiLU.

    Return (1, C, H, W) in `dtype`, channels_last. weight, bias (C,) float32.
    """
    return _run(backend, total.value).group_norm(total, weight, bias, groups, silu, dtype)


def _run(backend, x):
    """Return the module that implements the backend."""
    if not cuda.uses_triton(backend, x):
        return reference
    from accel.kernels.group_norm import triton

    return triton
