"""Split GEMMs by cuBLAS, through torch: float16 operands, float32 sums and results."""

from typing import Any

import torch
from torch import Tensor

from accel.kernels.split_linear.high_low import HighLow
from accel.kernels.split_linear.reference import finish

PART = 576  # inner dimension that one GEMM sums in its accumulators


def multiply_add(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """out (B, M, N) float32 = a·bᵀ, or out + a·bᵀ with `add`: a (B, M, K), b (B, N, K) float16, rows or columns
    contiguous."""
    torch.baddbmm(out, a, b.mT, beta=int(add), out_dtype=torch.float32, out=out)


def split_multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out (B, M, N) float32 = a·bᵀ from high and low of a (2, B, M, K) and b (2, B, N, K): the small GEMMs first, the
    large one in parts that are added outside the tensor cores."""
    (a_high, a_low), (b_high, b_low) = a, b
    multiply_add(a_low, b_high, out, False)
    multiply_add(a_high, b_low, out, True)
    for start in range(0, a_high.shape[-1], PART):
        multiply_add(a_high[..., start : start + PART], b_high[..., start : start + PART], out, True)


def linear(layer: Any, x: HighLow) -> Tensor | HighLow:
    """x HighLow (…, K) → (…, N), float32 or HighLow."""
    a = x.pair.flatten(1, -2)  # (2, M, K)
    y = torch.empty(a.shape[1], layer.columns, device=a.device)
    split_multiply(a[:, None], layer.pair[:, None], y[None])
    y = y.unflatten(0, x.pair.shape[1:-1])
    scale = layer.scale if x.scale is None else layer.scale * x.scale[..., None]
    return finish(layer, torch.addcmul(layer.bias, y, scale))
