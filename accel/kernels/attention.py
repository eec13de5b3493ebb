"""Multi-head self-attention from a packed projection."""

import torch.nn.functional as F


def attention(qkv, num_heads):
    """softmax(q·kᵀ/√d)·v per head (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).

    qkv (N, T, 3D): q, k, v side by side, each head-major → (N, T, D), same dtype.
    """
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # each (N, h, T, d)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
