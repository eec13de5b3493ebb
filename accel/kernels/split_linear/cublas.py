"""Split GEMMs with cuBLAS, through torch: float16 operands, float32 sums and results.

The three GEMMs are one GEMM over a concatenated inner dimension, [high, low, high]·[low, high,
high], so that partial sums stay in the accumulators. Kernels write their results in this layout.
"""

from typing import Any

import torch
from torch import Tensor

from accel.kernels import gpu
from accel.kernels.split_linear.high_low import HighLow, split, stacked

# Inner dimension of high·high that one GEMM may sum in its accumulators, by compute capability.
# With the emulated tensor cores of tests/kernels/tensor_cores.py the error is then at most 2e-6.
PIECE = {(7, 0): 2304, (7, 5): 576}
OTHER_PIECE = 1152


def multiply_add(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """Compute out (…, M, N) float32 = a·b, or out + a·b with `add`.

    a (…, M, K), b (…, K, N): float16, with two or three dims.
    """
    multiply = torch.baddbmm if a.ndim == 3 else torch.addmm
    multiply(out, a, b, beta=int(add), out_dtype=torch.float32, out=out)


def arrange(weight: Tensor) -> Tensor:
    """Return weights (N, K) float32 as [low, high, high] (N, 3·K) float16, scaled as by `split`."""
    high, low = split(weight).pair
    return torch.cat([low, high, high], -1)


def split_multiply(a: Tensor, b: Tensor, out: Tensor, small: int) -> None:
    """Compute out = a·b from operands whose parts are concatenated along K.

    The first `small` columns are products with a low part. The rest, high·high, is computed in
    pieces that are added outside the tensor cores.
    """
    depth = a.shape[-1]
    piece = PIECE.get(gpu.capability(a.device), OTHER_PIECE)
    ends = [*range(small + piece, depth, piece), depth]
    for start, end in zip([0, *ends], ends):
        multiply_add(a[..., start:end], b[..., start:end, :], out, start > 0)


def linear(layer: Any, x: HighLow) -> Tensor | HighLow:
    """Apply the layer: x HighLow (…, K) → (…, N), float32 or HighLow."""
    shape = x.pair.shape[1:-1]
    a = stacked(x.pair).flatten(0, -2)  # (M, 3·K)
    y = torch.empty(len(a), layer.columns, device=a.device)
    split_multiply(a, layer.pair.t(), y, 2 * layer.depth)
    row_scale = None if x.scale is None else x.scale.flatten()
    from accel.kernels.split_linear import triton

    out = triton.finish(layer, y, row_scale)
    return HighLow(out.unflatten(1, shape), None) if layer.high_low else out.unflatten(0, shape)
