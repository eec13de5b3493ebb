"""A float32 tensor as two of float16, high and low, and powers of two.

Two float16 hold 22 of float32's 24 bits. The powers of two keep both in float16's range, and low
parts out of its subnormals: with a row's largest value between 2¹⁴ and 2¹⁵, elements down to 2⁻¹⁷
of it keep all their bits, and smaller ones an absolute error of 2⁻³⁹ of it. Multiplying back is
exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 65504.0  # of float16


class HighLow(NamedTuple):
    """A float32 tensor (…, K): (high + low) · scale."""

    # (2, …, K) float16, contiguous or a `new_stack`: high, low. (1, …, K): high, for a layer that
    # takes no low parts.
    pair: Tensor
    scale: Tensor | None  # (…,) float32, a power of two per row; None is 1

    def value(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the tensor (…, K) in `dtype`."""
        value = self.pair[0].to(dtype) + self.pair[1].to(dtype)
        return value if self.scale is None else value * self.scale[..., None].to(dtype)


def split(x: Tensor, per_row: bool = True) -> HighLow:
    """Split x (…, K) float32.

    per_row: with a power of two per row; without, values beyond 65504 become infinite.
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
    """Return 2^exponent as float32, by its bits: exponent int32, from -126 to 127.

    torch.ldexp of a tensor on another GPU than the current one accesses memory illegally (torch
    2.11).
    """
    return ((exponent + 127) << 23).view(torch.float32)


def new_stack(*shape: int, device: torch.device) -> Tensor:
    """Return an empty pair (2, …, K) with memory (…, 3·K) for high, low, high.

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
    """Return a pair (2, …, K) as (…, 3·K): high, low, high. A `new_stack` is not copied."""
    *shape, depth = pair.shape[1:]
    if (pair.stride(0), pair.stride(-2)) != (depth, 3 * depth):
        return torch.cat([*pair, pair[0]], -1)
    return pair.as_strided((*shape, 3 * depth), pair.stride()[1:])


def balance(weight: Tensor, bias: Tensor) -> Tensor:
    """Return powers of two (N,) that bring x·Wᵀ + b near 4 in size for inputs of size one.

    float16 then has room for outliers four thousand times as large, at a floor of 2⁻²⁷ of the
    usual size.
    """
    size = (weight.double().square().sum(1) + bias.double().square()).sqrt()  # (N,)
    exponent = torch.where(size > 0, torch.log2(4 / size.clamp(min=1e-300)), 0)
    return torch.exp2(exponent.round().clamp(-60, 60)).float()
