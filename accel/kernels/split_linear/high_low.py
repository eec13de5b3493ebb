"""A float32 tensor as a pair of float16 tensors, high and low, with power-of-two scales.

Two float16 hold 22 of float32's 24 bits. The scales keep both in float16's range, and keep low
parts above its subnormals: if the largest value of a row is between 2¹⁴ and 2¹⁵, elements down to
2⁻¹⁷ of it keep all 22 bits, and smaller elements have an absolute error of 2⁻³⁹ of it. Multiplying
by the scale is exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 65504.0  # largest float16


class HighLow(NamedTuple):
    """A float32 tensor (…, K): (high + low) · scale."""

    # [high, low] (2, …, K) float16, contiguous or a `new_stack`; [high] (1, …, K) for layers
    # without low parts.
    pair: Tensor
    scale: Tensor | None  # (…,) float32, a power of two per row; None is 1

    def value(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the tensor (…, K) in `dtype`."""
        value = self.pair[0].to(dtype) + self.pair[1].to(dtype)
        return value if self.scale is None else value * self.scale[..., None].to(dtype)


def split(x: Tensor, per_row: bool = True) -> HighLow:
    """Split x (…, K) float32.

    per_row: scale each row by a power of two. If false, values above 65504 become infinite.
    """
    scale = None
    if per_row:
        # amax = m·2^e with m in [1/2, 1); the clamp keeps the power of two itself a normal number.
        exponent = torch.frexp(x.abs().amax(-1)).exponent.clamp(min=-111, max=128)  # (…,)
        scale = _power_of_two(exponent - 15)
        x = x * _power_of_two(15 - exponent)[..., None]
    high = x.half()
    low = (x - high.float()).half()
    return HighLow(torch.stack([high, low]), scale)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent as float32, built from its bits: exponent int32, from -126 to 127.

    torch.ldexp is not used: for a tensor that is not on the current GPU, it accesses memory
    illegally (torch 2.11).
    """
    return ((exponent + 127) << 23).view(torch.float32)


def new_stack(*shape: int, device: torch.device) -> Tensor:
    """Return an empty pair (2, …, K), a view of memory (…, 3·K) for [high, low, high].

    The kernel that fills it writes high twice.
    """
    memory = torch.empty(*shape[:-1], 3, shape[-1], dtype=torch.float16, device=device)
    return memory.movedim(-2, 0)[:2]


def new_pair(*shape: int, device: torch.device, stack: bool = False) -> Tensor:
    """Return an empty pair (2, …, K), contiguous or a `new_stack`."""
    if stack:
        return new_stack(*shape, device=device)
    return torch.empty(2, *shape, dtype=torch.float16, device=device)


def stacked(pair: Tensor) -> Tensor:
    """Return a pair (2, …, K) as [high, low, high] (…, 3·K). A `new_stack` is not copied."""
    *shape, depth = pair.shape[1:]
    if (pair.stride(0), pair.stride(-2)) != (depth, 3 * depth):
        return torch.cat([*pair, pair[0]], -1)
    return pair.as_strided((*shape, 3 * depth), pair.stride()[1:])


def balance(weight: Tensor, bias: Tensor) -> Tensor:
    """Return powers of two (N,) that scale x·Wᵀ + b to a magnitude of about 4, for |x| of about 1.

    float16 then has room for outliers that are four thousand times larger, with an absolute error
    of 2⁻²⁷ of the typical magnitude.
    """
    size = (weight.double().square().sum(1) + bias.double().square()).sqrt()  # (N,)
    exponent = torch.where(size > 0, torch.log2(4 / size.clamp(min=1e-300)), 0)
    return torch.exp2(exponent.round().clamp(-60, 60)).float()
