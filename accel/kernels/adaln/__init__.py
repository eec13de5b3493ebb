"""The fused adaLN kernel: residual, gates, LayerNorm and modulation in one pass over the tokens.

adaLN-Zero (Peebles & Xie 2023, arXiv:2212.09748, section 3.2) computes between two GEMMs

    x ← x + Σᵢ gateᵢ · branchᵢ
    h = (x − mean(x)) / √(var(x) + ε) · (1 + scale) + shift        ε = 1e-6

Separate operations would read and write the float32 residual stream many times. The kernel loads
each element once. The sum and both statistics stay in registers. The variance is computed from
centred values, because E[x²] − mean² loses precision. h has the next GEMM's dtype, or is split into
high and low. An index on the device selects shifts, scales and gates from a table, so that one
captured graph serves every step.

With `rms_eps` the norm is x / √(mean(x²) + ε) (Zhang & Sennrich 2019, arXiv:1910.07467). Its weight
must be folded into the projection of `scale`. The Triton kernel takes x in float32 and the table in
float32 or half precision; the reference takes any dtype.
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

    dtype: x's by default. x (N, T, D): the residual stream. branches: up to two pairs
    (branch (N, T, D), index of its gate). With two branches, as at the end of a block, the sum is
    also written to x. shift and the gates are vector indices into the modulation's table, where
    scale follows shift. All tensors are contiguous. rms_eps: use RMSNorm with this ε instead of
    LayerNorm.
    """
    if not cuda.uses_triton(backend, x):
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

    Each token has its own power-of-two scale. stack: use the layout of cuBLAS's split GEMM.
    """
    if not cuda.uses_triton(backend, x):
        return split(reference.adaln(x, modulation, shift, branches, rms_eps))
    from accel.kernels.adaln import triton

    pair = new_pair(*x.shape, device=x.device, stack=stack)
    scales = torch.empty(x.shape[:2], device=x.device)
    triton.launch(x, modulation, shift, branches, rms_eps, pair, scales, stack)
    return HighLow(pair, scales)
