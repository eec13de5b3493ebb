"""Attention as its formula, in float32 or wider."""

import math

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (N, h, t, d), k and v (N, h, T, d) → (N, h, t, d) in q's dtype."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).mT / math.sqrt(q.shape[-1])  # (N, h, t, T)
    return (scores.softmax(-1) @ v.to(wide)).to(q.dtype)
