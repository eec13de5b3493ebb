"""Split attention by cuBLAS, a sample at a time."""

import math

import torch
from torch import Tensor

from accel.kernels.split_linear.cublas import split_multiply
from accel.kernels.split_linear.high_low import split

LIFT = 2.0**10  # of weights, before they are split


def attention(pair: Tensor, num_heads: int) -> Tensor:
    """pair (2, N, T, 3·D) float16 → (2, N, T, D)."""
    n, tokens, width = pair.shape[1:]
    dim = width // (3 * num_heads)
    out = torch.empty(n, tokens, num_heads, dim, device=pair.device)
    scores = torch.empty(num_heads, tokens, tokens, device=pair.device)
    mixed = torch.empty(num_heads, tokens, dim, device=pair.device)
    for sample in range(n):
        qkv = pair[:, sample].unflatten(-1, (3, num_heads, dim))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (2, h, T, d)
        split_multiply(q, k, scores)
        weights = torch.softmax(scores * (1 / math.sqrt(dim)), -1)
        split_multiply(split(weights * LIFT, per_row=False).pair, v.mT, mixed)
        out[sample] = mixed.transpose(0, 1) * (1 / LIFT)
    return split(out.flatten(2), per_row=False).pair
