"""Split attention in plain torch, in float64, and the references of triton.py, in float32."""

import math

import torch
from torch import Tensor

from accel.kernels.split_linear.high_low import split, stacked

LIFT = 2.0**15  # factor of the weights before the split, so that small ones keep their low parts
V_SCALE = 0.5  # factor of v − mean, which may be twice as large as v


def attention(pair: Tensor, num_heads: int) -> Tensor:
    """Compute attention: pair (2, N, T, 3·D) → (2, N, T, D)."""
    qkv = (pair[0].double() + pair[1].double()).unflatten(-1, (3, num_heads, -1))
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (N, h, T, d)
    out = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
    return split(out.transpose(1, 2).flatten(2).float(), per_row=False).pair


def centre(pair: Tensor, num_heads: int) -> Tensor:
    """Return v's mean over the tokens, from its high half: (N, h, d) float32.

    It is exact enough, because operands subtract and merge adds the same numbers.
    """
    return pair[0].float().mean(1).unflatten(-1, (3, num_heads, -1))[:, 2].contiguous()


def operands(pair: Tensor, centre: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k (G, T, 3·d) and v − mean (G, 2·T, 2·d), float16, for G = `count` heads.

    The heads of all samples are numbered consecutively; `first` is the first of the group.
    """
    group = slice(first, first + count)
    # (3, 2, N, h, T, d)
    qkv = pair.unflatten(-1, (3, centre.shape[1], -1)).permute(3, 0, 1, 4, 2, 5)
    q, k, v = qkv.flatten(2, 3)[:, :, group]  # each (2, G, T, d)
    centred = v[0].float() + v[1].float() - centre.flatten(0, 1)[group, None]
    v_high, v_low = split(centred * V_SCALE, per_row=False).pair
    both = torch.cat([v_high, v_low], -1)
    q_high, q_low = q
    k_high, k_low = k
    return (
        torch.cat([q_high, q_low, q_high], -1),
        torch.cat([k_low, k_high, k_high], -1),
        torch.cat([both, both], -2),
    )


def softmax(scores: Tensor, dim: int) -> Tensor:
    """Return LIFT · softmax(scores/√d) as [low, high] (G, T, 2·T) float16.

    It overwrites scores (G, T, T) float32.
    """
    weights = torch.softmax(scores / math.sqrt(dim), -1)
    high, low = split(LIFT * weights, per_row=False).pair
    return scores.view(torch.float16).copy_(torch.cat([low, high], -1))


def merge(mixed: Tensor, centre: Tensor, out: Tensor, first: int) -> None:
    """Write the sum of both parts of mixed (G, T, 2·d) float32, unscaled, plus the mean.

    out (2, N, T, D): a `new_stack`; only the G heads from `first` on are written.
    """
    heads, dim = centre.shape[1:]
    mean = centre.flatten(0, 1)[first : first + len(mixed), None]
    y = (mixed[..., :dim] + mixed[..., dim:]) / (LIFT * V_SCALE) + mean
    high, low = split(y, per_row=False).pair
    whole = stacked(out).unflatten(-1, (3, heads, dim))
    for index in range(len(mixed)):
        sample, head = divmod(first + index, heads)
        stack = torch.stack([high[index], low[index], high[index]], 1)  # (T, 3, d)
        whole[sample, :, :, head] = stack
