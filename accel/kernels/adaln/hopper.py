"""adaLN for few tokens on Hopper (hopper.cu)."""

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from accel.kernels import cuda
from accel.kernels.adaln.reference import EPS, Branches, Modulation

FILE = Path(__file__).with_suffix(".cu")
FEW_TOKENS = 4096  # up to which it wins (log/products-few-rows-h200.json)
WARPS = 8  # a warp computes a token
_SHARED_BYTES = 228 << 10  # of a multiprocessor


def runs(x: Tensor, table: Tensor, branches: Branches, dtype: torch.dtype) -> bool:
    """Whether the kernel takes these: a float32 residual and table, branches and a result in one half precision, widths
    in 128s up to 2048, all contiguous, on a GPU of capability 9.0."""
    tensors = [branch for branch, _ in branches]
    halves = {branch.dtype for branch in tensors} | ({dtype} - {torch.float32})
    return (
        cuda.capability(x.device) == (9, 0)
        and x.dtype == table.dtype == torch.float32
        and len(halves) <= 1
        and halves <= set(cuda.HALF)
        and x.shape[-1] % 128 == 0
        and x.shape[-1] <= 2048
        and all(tensor.is_contiguous() for tensor in (x, table, *tensors))
    )


class Variant(NamedTuple):
    """What is compiled for; hopper.cu says what each means."""

    width: int
    branches: int
    update: bool
    wide: bool


def source(variant: Variant, half: torch.dtype) -> str:
    """The whole CUDA text of a variant for branches and results in `half`."""
    return cuda.source((FILE,), variant, (cuda.conversions(cuda.HALF[half]),), EPS=f"{EPS}f")


@lru_cache(None)
def _kernel(variant, half, device):
    return cuda.Kernel(source(variant, half), "adaln", 32 * WARPS, _SHARED_BYTES // 2, device)


def adaln(
    x: Tensor, modulation: Modulation, shift: int, scale: int, branches: Branches, update: bool, dtype: torch.dtype
) -> Tensor:
    """As accel.kernels.adaln.adaln, where the kernel runs. A variant must be run once before it is captured."""
    n, tokens, width = x.shape
    out = torch.empty_like(x, dtype=dtype)
    half = dtype if dtype in cuda.HALF else next((branch.dtype for branch, _ in branches), torch.float16)
    blocks = -(-n * tokens // WARPS)
    if not blocks:
        return out
    # As many blocks on a multiprocessor as are needed to run all at once, no more.
    on_one = -(-blocks // cuda.multiprocessors(x.device))
    (first, gate1), (second, gate2) = (*branches, (None, 0), (None, 0))[:2]
    kernel = _kernel(Variant(width, len(branches), update, dtype == torch.float32), half, x.device)
    tensors = x, first, second, out, modulation.table, modulation.entry
    stride = ctypes.c_longlong(modulation.table.stride(0))
    numbers = n * tokens, tokens, shift, scale, gate1, gate2
    shared_bytes = _SHARED_BYTES // (on_one + 1)
    kernel.launch(blocks, *tensors, stride, *numbers, overlap=True, shared_bytes=shared_bytes)
    return out
