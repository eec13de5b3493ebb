"""Two passes over the residual stream, for networks with a separate modulation of each token.

silu_sum       SiLU(x + Σᵢ gateᵢ · branchᵢ + shift), the conditioning of each token
row_squares    Σ x² of each token, the statistic of an RMSNorm
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.kernels import cuda
from accel.kernels.adaln.reference import Branches, Modulation

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs has no Triton: the reference is then the only backend
    triton = None

BLOCK = 1024


def silu_sum(
    x: Tensor,
    modulation: Modulation,
    shift: int,
    branches: Branches,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return SiLU(x + Σ gate·branch + shift), (N, T, D) in `dtype`, by default x's.

    x (N, T, D), float32 for the Triton kernel. branches: two pairs (branch (N, T, D), index of its
    gate). shift and gates are vector indices into the table; the modulation is per sample. All
    tensors are contiguous.
    """
    dtype = dtype or x.dtype
    if not cuda.uses_triton(backend, x):
        vectors = modulation.table[modulation.entry].to(x.dtype)  # (N, V, D)
        total = x + vectors[:, shift, None]
        for branch, gate in branches:
            total = torch.addcmul(total, vectors[:, gate, None], branch.to(x.dtype))
        return F.silu(total).to(dtype)
    n, tokens, width = x.shape
    (first, gate1), (second, gate2) = branches
    out = torch.empty_like(x, dtype=dtype)
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        _silu_sum[(n * tokens, triton.cdiv(width, BLOCK))](
            x,
            first,
            second,
            out,
            modulation.table,
            modulation.entry,
            tokens,
            modulation.table.stride(0),
            shift,
            gate1,
            gate2,
            WIDTH=width,
            BLOCK=BLOCK,
        )
    return out


def row_squares(x: Tensor, backend: str = "auto") -> Tensor:
    """Return the sum of squares of each row of x (…, D), contiguous → (1, M), in x's dtype.

    The Triton kernel takes float32.
    """
    if not cuda.uses_triton(backend, x):
        return x.square().sum(-1).view(1, -1)
    width = x.shape[-1]
    out = torch.empty(1, x.numel() // width, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        _row_squares[(out.numel(),)](
            x, out, WIDTH=width, BLOCK=block, num_warps=max(1, min(8, block // 1024))
        )
    return out


if triton:

    @triton.jit(do_not_specialize=["tokens", "shift", "gate1", "gate2"])
    def _silu_sum(
        x_ptr,
        first_ptr,
        second_ptr,
        out_ptr,
        table_ptr,
        entry_ptr,
        tokens,
        entry_stride,
        shift,
        gate1,
        gate2,
        WIDTH: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        token = tl.program_id(0)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        vectors = table_ptr + tl.load(entry_ptr + token // tokens) * entry_stride + column
        place = token.to(tl.int64) * WIDTH + column
        total = tl.load(x_ptr + place, inside, 0.0)
        gate = tl.load(vectors + gate1 * WIDTH, inside, 0.0).to(tl.float32)
        total += gate * tl.load(first_ptr + place, inside, 0.0).to(tl.float32)
        gate = tl.load(vectors + gate2 * WIDTH, inside, 0.0).to(tl.float32)
        total += gate * tl.load(second_ptr + place, inside, 0.0).to(tl.float32)
        total += tl.load(vectors + shift * WIDTH, inside, 0.0).to(tl.float32)
        result = total / (1 + tl.exp(-total))
        tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), inside)

    @triton.jit
    def _row_squares(x_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        column = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row.to(tl.int64) * WIDTH + column, column < WIDTH, 0.0)
        tl.store(out_ptr + row, tl.sum(x * x, 0))
