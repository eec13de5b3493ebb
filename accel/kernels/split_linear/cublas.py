"""Split GEMMs by cuBLAS, through torch: float16 operands, float32 sums and results.

The three GEMMs are one over a concatenated inner dimension, [high, low, high]·[low, high, high], so that partial sums
stay in the accumulators. Whoever writes an operand writes it so.
"""

from typing import Any

import torch
from torch import Tensor

from accel import gpu
from accel.kernels import cuda
from accel.kernels.split_linear import reference
from accel.kernels.split_linear.high_low import HighLow, split, stacked

# Most of high·high's inner dimension that one GEMM sums in its accumulators, by compute capability: a GEMM is then
# within 2.5e-6 of float64, by the emulated tensor cores of tests/kernels/tensor_cores.py.
PIECE = {(7, 0): 4608, (7, 5): 576}
OTHER_PIECE = 1152


def multiply_add(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """out (B, M, N) float32 = a·b, or out + a·b with `add`: a (B, M, K), b (B, K, N) float16."""
    torch.baddbmm(out, a, b, beta=int(add), out_dtype=torch.float32, out=out)


def arrange(weight: Tensor) -> Tensor:
    """Weights (N, K) float32, scaled as `split` scales them → (N, 3·K) float16: low, high, high."""
    high, low = split(weight).pair
    return torch.cat([low, high, high], -1)


def split_multiply(a: Tensor, b: Tensor, out: Tensor, piece: int) -> None:
    """out (M, N) float32 = a·bᵀ from a (M, 3·K): high, low, high, and b (N, 3·K): low, high, high. The small GEMMs come
    first; high·high in pieces, which are added outside the tensor cores."""
    depth = a.shape[1] // 3
    ends = [*range(2 * depth + piece, 3 * depth, piece), 3 * depth]
    for start, end in zip([0, *ends], ends):
        multiply_add(a[None, :, start:end], b[None, :, start:end].mT, out[None], start > 0)


def linear(layer: Any, x: HighLow) -> Tensor | HighLow:
    """x HighLow (…, K) → (…, N), float32 or HighLow."""
    shape, a = x.pair.shape[1:-1], stacked(x.pair).flatten(0, -2)  # (M, 3·K)
    y = torch.empty(len(a), layer.columns, device=a.device)
    split_multiply(a, layer.pair, y, PIECE.get(gpu.capability(a.device), OTHER_PIECE))
    row_scale = None if x.scale is None else x.scale.flatten()
    if not cuda.HAS_TRITON:
        scale = layer.scale if row_scale is None else layer.scale * row_scale[:, None]
        return reference.finish(layer, torch.addcmul(layer.bias, y, scale).unflatten(0, shape))
    from accel.kernels.split_linear.finish import finish

    out = finish(layer, y, row_scale)
    return HighLow(out.unflatten(1, shape), None) if layer.high_low else out.unflatten(0, shape)
