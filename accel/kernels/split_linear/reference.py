"""The split linear layer in plain torch, with GEMMs in float64."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from accel.kernels.split_linear.high_low import LARGEST, HighLow, split


def arrange(weight: Tensor) -> Tensor:
    """Return weights (N, K) float32 as a pair (2, N, K)."""
    return split(weight).pair


def linear(layer: Any, x: HighLow) -> Tensor | HighLow:
    """Apply the layer: x HighLow (…, K) → (…, N), float32 or HighLow."""
    x_high = x.pair[0].double()
    w_high = layer.pair[0].double()
    y = x_high @ w_high.t()
    if layer.low:
        x_low = x.pair[1].double()
        w_low = layer.pair[1].double()
        y = x_low @ w_high.t() + x_high @ w_low.t() + y
    if x.scale is not None:
        y = y * x.scale[..., None]
    return finish(layer, (y * layer.scale + layer.bias).float())


def finish(layer: Any, y: Tensor) -> Tensor | HighLow:
    """Apply GELU to y (…, N) float32, check for overflow and split, as the layer requires.

    For backends whose GEMM has no such epilogue.
    """
    if layer.gelu:
        y = F.gelu(y, approximate="tanh") * layer.gelu_scale
    if not layer.high_low:
        return y
    layer.overflow |= (y.abs() > LARGEST).any().int()
    return split(y, per_row=False)
