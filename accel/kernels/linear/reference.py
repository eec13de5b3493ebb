"""Epilogues in plain torch, for backends whose GEMM lacks them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.kernels.qk_norm_rotary import qk_norm_rotary
from accel.kernels.rows import row_squares
from accel.kernels.swiglu import swiglu

TWO_MATRICES = ("swiglu", "modulate")  # epilogues for which W consists of two matrices, stacked


class EpilogueArgs(NamedTuple):
    """Operands of an epilogue, and its additional outputs."""

    rotation: Tensor | None = None  # (positions, d/2, 2) float32: cosine and sine
    tokens: int = 1  # per batch row
    first: int = 0  # position of a row's first token
    stream: Tensor | None = None  # (…, N) float32, contiguous
    gate: Tensor | None = None  # (…, N) half; rows have a uniform stride
    squares: Tensor | None = None  # (parts, M) float32: sums of the stream's squares
    eps: float = 0.0


def rotate(y: Tensor, args: EpilogueArgs) -> Tensor:
    """Rotate queries and keys of y (N, t, 3·D), in place."""
    assert args.rotation is not None
    return qk_norm_rotary(y, args.rotation, args.first)


def modulate(y: Tensor, args: EpilogueArgs) -> Tensor:
    """Return t·r·(1 + y₁) + y₂ of the residual stream t (…, N), y (…, 2·N)."""
    stream = args.stream
    assert stream is not None and args.squares is not None
    scale, shift = y.to(stream.dtype).chunk(2, dim=-1)
    mean = args.squares.sum(0).view(*stream.shape[:-1], 1) / stream.shape[-1]
    out = torch.addcmul(shift, stream * torch.rsqrt(mean + args.eps), 1 + scale)
    return out.to(y.dtype)


def residual(y: Tensor, args: EpilogueArgs) -> Tensor:
    """Add gate·y to the residual stream t (…, N), in place. Return the sums of t², (1, M)."""
    stream = args.stream
    assert stream is not None and args.gate is not None
    stream.addcmul_(args.gate.to(stream.dtype), y.to(stream.dtype))
    return row_squares(stream)


EPILOGUES: dict[str, Callable] = {
    "gelu": lambda y, args: F.gelu(y, approximate="tanh"),
    "silu": lambda y, args: F.silu(y),
    "swiglu": lambda y, args: swiglu(y),
    "rotate": rotate,
    "modulate": modulate,
    "residual": residual,
}
