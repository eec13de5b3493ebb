"""Split attention with cuBLAS: two batched GEMMs for each group of heads.

The other steps are Triton kernels (triton.py).

    centre        v's mean over the tokens
    operands      q as [high, low, high], k as [low, high, high], and v − mean as [high, low] twice,
                  for the low and the high weights
    GEMM          scores, with inner dimension 3·d
    softmax       weights as [low, high], in the memory of the scores
    GEMM          weights · high of v, and weights · low of v, with inner dimension 2·T
    merge         their sum plus the mean, split as [high, low, high]

Tensor cores truncate towards zero, so errors add up if all summands have one sign. Weights are
positive; the mean is therefore subtracted from v. Since weights sum to one, merge adds it back.
"""

import torch
from torch import Tensor

from accel.kernels.split_linear.cublas import multiply_add, split_multiply
from accel.kernels.split_linear.high_low import new_stack

MAX_SCORE_BYTES = 64 << 20  # per group of heads, unless one head needs more (4·T²)


def attention(pair: Tensor, num_heads: int) -> Tensor:
    """Compute attention: pair (2, N, T, 3·D) float16, contiguous → (2, N, T, D), a `new_stack`."""
    from accel.kernels.split_attention import triton

    n, tokens, width = pair.shape[1:]
    heads = n * num_heads  # over all samples
    dim = width // (3 * num_heads)
    out = new_stack(n, tokens, width // 3, device=pair.device)
    group = min(heads, max(1, MAX_SCORE_BYTES // (4 * tokens * tokens)))  # heads at a time
    scores = torch.empty(group, tokens, tokens, device=pair.device)
    mixed = torch.empty(group, tokens, 2 * dim, device=pair.device)
    centre = triton.centre(pair, num_heads)
    for first in range(0, heads, group):
        count = min(group, heads - first)
        q, k, v = triton.operands(pair, centre, first, count)
        multiply_add(q, k.mT, scores[:count], add=False)
        weights = triton.softmax(scores[:count], dim)
        split_multiply(weights, v, mixed[:count], small=tokens)
        triton.merge(mixed[:count], centre, out, first)
    return out
