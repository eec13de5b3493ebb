"""Split attention in plain torch, in float64; and the steps between cuBLAS's two GEMMs, in float32."""

import math

import torch
from torch import Tensor

from accel.kernels.split_linear.high_low import split

LIFT = 2.0**15  # of softmax's weights before they are split: flat ones then keep their low parts


def attention(pair: Tensor, num_heads: int) -> Tensor:
    """pair (2, N, T, 3·D) → (2, N, T, D)."""
    qkv = (pair[0].double() + pair[1].double()).unflatten(-1, (3, num_heads, -1))
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (N, h, T, d)
    out = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
    return split(out.transpose(1, 2).flatten(2).float(), per_row=False).pair


def operands(pair: Tensor, num_heads: int, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of `count` heads of all samples from `first` on: q, k (G, T, 3·d) and v (G, 2·T, 2·d) float16."""
    qkv = pair.unflatten(-1, (3, num_heads, -1)).permute(3, 0, 1, 4, 2, 5)  # (3, 2, N, h, T, d)
    q, k, v = qkv.flatten(2, 3)[:, :, first : first + count]  # each (2, G, T, d)
    both = torch.cat([*v], -1)
    return torch.cat([q[0], q[1], q[0]], -1), torch.cat([k[1], k[0], k[0]], -1), torch.cat([both, both], -2)


def softmax(scores: Tensor, dim: int) -> Tensor:
    """scores (G, T, T) float32 → LIFT · softmax(scores/√d): low, high (G, T, 2·T) float16, in the scores' memory."""
    high, low = split(LIFT * torch.softmax(scores / math.sqrt(dim), -1), per_row=False).pair
    return scores.view(torch.float16).copy_(torch.cat([low, high], -1))


def merge(mixed: Tensor, out: Tensor, num_heads: int, first: int) -> None:
    """mixed (G, T, 2·d) float32, two parts of a sum, divided by LIFT → the heads of out (2, N, T, D), a `new_stack`."""
    n, tokens, width = out.shape[1:]
    count, dim = len(mixed), width // num_heads
    high, low = split((mixed[..., :dim] + mixed[..., dim:]) / LIFT, per_row=False).pair
    whole = out.as_strided((n, tokens, 3, num_heads, dim), (tokens * 3 * width, 3 * width, width, dim, 1))
    for place, part in enumerate((high, low, high)):
        for index in range(count):
            sample, head = divmod(first + index, num_heads)
            whole[sample, :, place, head] = part[index]
