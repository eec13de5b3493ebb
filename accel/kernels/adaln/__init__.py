"""The fused adaLN kernel: residual, gates, LayerNorm and modulation in one pass over the tokens.

adaLN-Zero (Peebles & Xie 2023, arXiv:2212.09748, section 3.2) puts between two GEMMs

    x ← x + Σᵢ gateᵢ · branchᵢ
    h = (x − mean(x)) / √(var(x) + ε) · (1 + scale) + shift        ε = 1e-6

As separate operations this reads and writes the float32 residual stream many times. Here an
element is loaded once. The sum and both statistics stay in registers; the variance is taken of
centred values, since E[x²] − mean² cancels. h leaves in the next GEMM's dtype, or split into high
and low. An index on the device selects shifts, scales and gates from a table, so that one captured
graph serves every step.

With `rms_eps` the norm is x / √(mean(x²) + ε) (Zhang & Sennrich 2019, arXiv:1910.07467). Its weight
belongs in scale's projection. Triton's kernel takes x in float32 and the table in float32 or half
precision, the reference any dtype.
"""

import torch
from torch import Tensor

from accel.kernels import cuda
from accel.kernels.adaln import reference
from accel.kernels.adaln.reference import Branches, Modulation
from accel.kernels.split_linear.high_low import HighLow, new_pair, split


def adaln(
    x: Tensor,
    modulation: Modulation,
    shift: int,
    branches: Branches = (),
    rms_eps: float | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return LayerNorm(x + Σ gate·branch)·(1 + scale) + shift, (N, T, D) in `dtype`.

    dtype: by default x's. x (N, T, D): the residual stream. branches: up to two pairs
    (branch (N, T, D), index of its gate). Two end a block of the network: then the sum is written
    back to x. shift and the gates are vector indices into the modulation's table; scale follows
    shift there. All are contiguous. rms_eps: RMSNorm with this ε in LayerNorm's place.
    """
    if not cuda.uses_triton("adaln", backend, x):
        out = reference.adaln(x, modulation, shift, branches, rms_eps)
        return out.to(dtype or x.dtype)
    from accel.kernels.adaln import triton

    out = torch.empty_like(x, dtype=dtype)
    triton.launch(x, modulation, shift, branches, rms_eps, out)
    return out


def adaln_split(
    x: Tensor,
    modulation: Modulation,
    shift: int,
    branches: Branches = (),
    rms_eps: float | None = None,
    stack: bool = False,
    backend: str = "auto",
) -> HighLow:
    """Return the result of `adaln` for a float32 x, split into high and low.

    A token has a power of two. stack: in the layout that cuBLAS's split GEMM takes.
    """
    if not cuda.uses_triton("adaln_split", backend, x):
        return split(reference.adaln(x, modulation, shift, branches, rms_eps))
    from accel.kernels.adaln import triton

    pair = new_pair(*x.shape, device=x.device, stack=stack)
    scales = torch.empty(x.shape[:2], device=x.device)
    triton.launch(x, modulation, shift, branches, rms_eps, pair, scales, stack)
    return HighLow(pair, scales)
