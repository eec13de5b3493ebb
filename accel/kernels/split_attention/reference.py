"""Split attention in plain torch, in float64."""

import math

from torch import Tensor

from accel.kernels.split_linear.high_low import split


def attention(pair: Tensor, num_heads: int) -> Tensor:
    """Compute attention: pair (2, N, T, 3·D) → (2, N, T, D)."""
    qkv = (pair[0].double() + pair[1].double()).unflatten(-1, (3, num_heads, -1))
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (N, h, T, d)
    out = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
    return split(out.transpose(1, 2).flatten(2).float(), per_row=False).pair
