"""SwiGLU between two GEMMs in one pass (Shazeer 2020, arXiv:2002.05202).

    silu(a)·b,    silu(a) = a / (1 + e^-a)

One GEMM computes a and b, concatenated. Separate tensor operations would also write and read
silu(a). The result has the input's dtype, or is split into high and low.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.kernels import cuda, gpu
from accel.kernels.split_linear.high_low import HighLow, new_pair, split

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents

    from accel.kernels.split_linear.triton import row_config, store_row
except ImportError:  # torch for CPUs has no Triton: the reference is then the only backend
    triton = None

BLOCK = 1024


def swiglu(x: Tensor, backend: str = "auto") -> Tensor:
    """Compute silu(a)·b (…, F) of x (…, 2·F) = [a, b], contiguous.

    The result has x's dtype; the arithmetic is in float32 or wider.
    """
    if not cuda.uses_triton(backend, x):
        return _torch(x)
    width = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    tokens = x.numel() // x.shape[-1]
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        _swiglu[(tokens, triton.cdiv(width, BLOCK))](
            x,
            out,
            WIDTH=width,
            BLOCK=BLOCK,
            START_NEXT=gpu.capability(x.device) >= (9, 0),  # programmatic dependent launch
        )
    return out


def swiglu_split(x: Tensor, backend: str = "auto", stack: bool = False) -> HighLow:
    """Compute `swiglu` of a float32 x (…, 2·F) → (…, F), split into high and low.

    Each token has its own power-of-two scale. stack: use the layout of cuBLAS's split GEMM.
    """
    if not cuda.uses_triton(backend, x):
        return split(_torch(x))
    shape = x.shape[:-1]
    width = x.shape[-1] // 2
    pair = new_pair(*shape, width, device=x.device, stack=stack)
    scale = torch.empty(shape, device=x.device)
    tokens = scale.numel()
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        _swiglu_split[(tokens,)](
            x,
            pair,
            scale,
            tokens * width,  # from high to low
            STACK=stack,
            **row_config(width),
        )
    return HighLow(pair, scale)


def _torch(x):
    """Compute the reference."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    a, b = wide.chunk(2, dim=-1)
    return (F.silu(a) * b).to(x.dtype)


if triton:

    @triton.jit
    def _swiglu(x_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, START_NEXT: tl.constexpr):
        if START_NEXT:
            gdc_launch_dependents()
        token = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        first = x_ptr + token * (2 * WIDTH) + column
        a = tl.load(first, inside, 0.0).to(tl.float32)
        b = tl.load(first + WIDTH, inside, 0.0).to(tl.float32)
        result = a / (1 + tl.exp(-a)) * b
        tl.store(out_ptr + token * WIDTH + column, result.to(out_ptr.dtype.element_ty), inside)

    @triton.jit(do_not_specialize=["low"])
    def _swiglu_split(
        x_ptr,
        pair_ptr,
        scale_ptr,
        low,
        STACK: tl.constexpr,
        WIDTH: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < WIDTH
        first = x_ptr + token * (2 * WIDTH) + column
        a = tl.load(first, inside, 0.0)
        y = a / (1 + tl.exp(-a)) * tl.load(first + WIDTH, inside, 0.0)
        store_row(pair_ptr, scale_ptr, token, column, y, low, WIDTH, STACK)
