"""The fused adaLN kernel: residual, gates, LayerNorm and modulation in one pass over the tokens.

adaLN-Zero (Peebles & Xie 2023, arXiv:2212.09748, section 3.2) puts between two GEMMs

    x ← x + Σᵢ gateᵢ · branchᵢ        h = (x − mean(x)) / √(var(x) + ε) · (1 + scale) + shift        ε = 1e-6

As separate operations this reads and writes the float32 residual stream many times. Here an element is loaded once. The
sum and both statistics stay in registers; the variance is taken of centred values, since E[x²] − mean² cancels. h
leaves in the next GEMM's dtype, or split into high and low. Shifts, scales and gates come from a table by an index on
the device, so that one captured graph serves every step.

With `rms_eps` the norm is x / √(mean(x²) + ε) (Zhang & Sennrich 2019, arXiv:1910.07467). Its weight belongs in scale's
projection.

    triton      any GPU: x and table float32
    torch       the reference, any dtype and device
    auto        triton for float32 on a GPU, else torch
"""

import torch
from torch import Tensor

from accel.kernels import check_backend, cuda
from accel.kernels.adaln import reference
from accel.kernels.adaln.reference import Branches, Modulation
from accel.kernels.split_linear import HighLow, split

BACKENDS = ("auto", "triton", "torch")


def adaln(
    x: Tensor,
    modulation: Modulation,
    shift: int,
    scale: int,
    branches: Branches = (),
    update: bool = False,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    rms_eps: float | None = None,
) -> Tensor:
    """LayerNorm(x + Σ gate·branch)·(1 + scale) + shift → (N, T, D) in `dtype`, x's if not given.

    x (N, T, D): the residual stream. branches: up to two pairs (branch (N, T, D), index of its gate). shift, scale and
    the gates are vector indices into the modulation's table. update: the sum is written back to x. All are contiguous.
    rms_eps: RMSNorm with this ε in LayerNorm's place.
    """
    check_backend("adaln", backend, BACKENDS)
    dtype = dtype or x.dtype
    if (_portable(x) if backend == "auto" else backend) == "triton":
        from accel.kernels.adaln import triton

        return triton.adaln(x, modulation, shift, scale, branches, update, dtype, rms_eps)
    return reference.adaln(x, modulation, shift, scale, branches, update, rms_eps).to(dtype)


def adaln_split(
    x: Tensor,
    modulation: Modulation,
    shift: int,
    scale: int,
    branches: Branches = (),
    update: bool = False,
    backend: str = "auto",
    rms_eps: float | None = None,
    stack: bool = False,
) -> HighLow:
    """As `adaln`, x float32, the result split into high and low with a power of two a token; "triton" or "torch".
    stack: in the layout that cuBLAS's split GEMM takes."""
    check_backend("adaln_split", backend, BACKENDS)
    if (_portable(x) if backend == "auto" else backend) == "torch":
        return split(reference.adaln(x, modulation, shift, scale, branches, update, rms_eps))
    from accel.kernels.adaln import triton

    return HighLow(*triton.adaln_split(x, modulation, shift, scale, branches, update, rms_eps, stack))


def _portable(x):
    return "triton" if cuda.HAS_TRITON and x.is_cuda and x.dtype == torch.float32 else "torch"
