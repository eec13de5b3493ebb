"""The epilogues in plain torch, for backends whose GEMM lacks them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.kernels.qk_norm_rotary import qk_norm_rotary
from accel.kernels.rows import row_squares
from accel.kernels.swiglu import swiglu

TWO = ("swiglu", "modulate")  # of two matrices, one below the other in W


class Beside(NamedTuple):
    """Operands of an epilogue, and its outputs beside the result."""

    rotation: Tensor | None = None  # (positions, d/2, 2) float32: cosine and sine
    tokens: int = 1  # of a batch row
    first: int = 0  # position of its first token
    stream: Tensor | None = None  # (…, N) float32, contiguous
    gate: Tensor | None = None  # (…, N) half; rows lie at one distance from each other
    squares: Tensor | None = None  # (parts, M) float32: sums of the stream's squares
    eps: float = 0.0


def rotate(y: Tensor, beside: Beside) -> Tensor:
    """Rotate queries and keys of y (N, t, 3·D), in place."""
    assert beside.rotation is not None
    return qk_norm_rotary(y, beside.rotation, beside.first)


def modulate(y: Tensor, beside: Beside) -> Tensor:
    """Return t·r·(1 + y₁) + y₂ of the residual stream t (…, N), y (…, 2·N)."""
    stream = beside.stream
    assert stream is not None and beside.squares is not None
    scale, shift = y.to(stream.dtype).chunk(2, dim=-1)
    mean = beside.squares.sum(0).view(*stream.shape[:-1], 1) / stream.shape[-1]
    out = torch.addcmul(shift, stream * torch.rsqrt(mean + beside.eps), 1 + scale)
    return out.to(y.dtype)


def residual(y: Tensor, beside: Beside) -> Tensor:
    """Add gate·y to the residual stream t (…, N), in place. Return the sums of t², (1, M)."""
    stream = beside.stream
    assert stream is not None and beside.gate is not None
    stream.addcmul_(beside.gate.to(stream.dtype), y.to(stream.dtype))
    return row_squares(stream)


AFTER: dict[str, Callable] = {
    "gelu": lambda y, beside: F.gelu(y, approximate="tanh"),
    "silu": lambda y, beside: F.silu(y),
    "swiglu": lambda y, beside: swiglu(y),
    "rotate": rotate,
    "modulate": modulate,
    "residual": residual,
}
