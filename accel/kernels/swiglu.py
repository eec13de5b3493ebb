"""SwiGLU between two GEMMs in one pass: silu(a)·b, silu(a) = a / (1 + e^-a)     (Shazeer 2020, arXiv:2002.05202)

One GEMM gives a and b side by side. As tensor operations, silu(a) crosses memory twice more.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.kernels import check_backend, cuda

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents
except ImportError:  # on Windows and macOS: the reference is then the only backend
    triton = None

BACKENDS = ("auto", "triton", "torch")
BLOCK = 1024


def swiglu(x: Tensor, backend: str = "auto") -> Tensor:
    """x (…, 2·F), a and b side by side → silu(a)·b (…, F) in x's dtype, computed in float32 or wider.

    backend: "triton" (half precision or float32, contiguous), "torch" (the reference, any dtype), or "auto": triton on
    a GPU.
    """
    check_backend("swiglu", backend, BACKENDS)
    if backend == "auto":
        backend = "triton" if triton and x.is_cuda and x.dtype != torch.float64 else "torch"
    return (_triton if backend == "triton" else _torch)(x)


def _torch(x):
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return (F.silu(a) * b).to(x.dtype)


def _triton(x):
    if x.dtype not in (*cuda.HALF, torch.float32) or not x.is_contiguous():
        raise TypeError("swiglu: backend 'triton' takes a contiguous tensor in half precision or float32")
    width = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    start_next = cuda.capability(x.device) >= (9, 0)  # programmatic dependent launch
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        grid = x.numel() // x.shape[-1], triton.cdiv(width, BLOCK)
        _swiglu[grid](x, out, WIDTH=width, BLOCK=BLOCK, START_NEXT=start_next)
    return out


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
