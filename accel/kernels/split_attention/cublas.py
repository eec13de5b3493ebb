"""Split attention by cuBLAS: two batched GEMMs for a group of heads.

Around them run Triton kernels without tensor cores (kernels.py), or, where there is no Triton,
their reference implementations.

    centre        v's mean over the tokens
    operands      q: high, low, high    k: low, high, high
                  v − mean: high, low, for weights' low and again for their high
    GEMM          scores, over an inner dimension of 3·d
    softmax       weights, low and high, in the scores' memory
    GEMM          (low + high)·v's high and (low + high)·v's low, side by side, over 2·T
    merge         their sum and the mean, split: high, low, high

Weights are positive: in a sum with one sign tensor cores truncate always in one direction. So v
goes without its mean, which weights that sum to one give back.
"""

from types import ModuleType

import torch
from torch import Tensor

from accel.kernels import cuda
from accel.kernels.split_attention import reference
from accel.kernels.split_linear.cublas import multiply_add, split_multiply
from accel.kernels.split_linear.high_low import new_stack

SCORES = 64 << 20  # bytes that a group's scores may take; one head's, 4·T², if they are more


def attention(pair: Tensor, num_heads: int) -> Tensor:
    """Compute attention: pair (2, N, T, 3·D) float16, contiguous → (2, N, T, D), a `new_stack`."""
    kernels: ModuleType = reference
    if cuda.HAS_TRITON:
        from accel.kernels.split_attention import triton as kernels
    n, tokens, width = pair.shape[1:]
    heads = n * num_heads  # of all samples
    dim = width // (3 * num_heads)
    out = new_stack(n, tokens, width // 3, device=pair.device)
    group = min(heads, max(1, SCORES // (4 * tokens * tokens)))  # heads at a time
    scores = torch.empty(group, tokens, tokens, device=pair.device)
    mixed = torch.empty(group, tokens, 2 * dim, device=pair.device)
    centre = kernels.centre(pair, num_heads)
    for first in range(0, heads, group):
        count = min(group, heads - first)
        q, k, v = kernels.operands(pair, centre, first, count)
        multiply_add(q, k.mT, scores[:count], add=False)
        weights = kernels.softmax(scores[:count], dim)
        split_multiply(weights, v, mixed[:count], small=tokens)
        kernels.merge(mixed[:count], centre, out, first)
    return out
