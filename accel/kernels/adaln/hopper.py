"""The row kernel for few rows on Hopper (norm_hopper.cu), which accel.kernels.adaln chooses there."""

import ctypes
from functools import lru_cache
from pathlib import Path

import torch

from accel.kernels import cuda as hopper

SOURCE = Path(__file__).with_suffix(".cu")
ROWS = 4096  # up to which it wins (log/products-few-rows-h200.json)
WARPS = 8  # rows of a block
_SHARED_BYTES = 228 << 10  # of a multiprocessor


def refusal(x, table, branches, dtype):
    """Why this kernel cannot take these, or None."""
    if not x.is_cuda or torch.cuda.get_device_capability(x.device) != (9, 0):
        return "runs on a GPU of capability 9.0"
    halves = {branch.dtype for branch in branches} | ({dtype} - {torch.float32})
    if x.dtype != torch.float32 or table.dtype != torch.float32 or len(halves) > 1 or not halves <= set(hopper.HALF):
        return "takes a float32 residual and table, and branches and a result in one half precision"
    if x.shape[-1] % 128 or x.shape[-1] > 2048:
        return "takes widths in 128s up to 2048"
    return None


def source(width, branches, update, half, wide, eps):
    """The whole CUDA text of a variant."""
    constants = dict(WIDTH=width, BRANCHES=branches, UPDATE=int(update), WIDE=int(wide), EPS=f"{eps}f")
    return hopper.text(SOURCE, constants, hopper.conversions(hopper.HALF[half]))


@lru_cache(None)
def _kernel(width, branches, update, half, wide, eps, device):
    return hopper.load(
        source(width, branches, update, half, wide, eps), SOURCE.name, "norm_modulate", _SHARED_BYTES // 2, device
    )


def norm_hopper(x, modulation, shift, scale, branches, update, dtype, eps, overlap=True):
    """As accel.kernels.adaln.norm_modulate, where `refusal` has none. Meet a variant once before capturing it in a graph."""
    n, tokens, width = x.shape
    out = torch.empty_like(x, dtype=dtype)
    half = dtype if dtype in hopper.HALF else next((branch.dtype for branch, _ in branches), torch.float16)
    function = _kernel(width, len(branches), update, half, dtype == torch.float32, eps, x.device)
    blocks = -(-n * tokens // WARPS)
    if not blocks:
        return out
    # As many blocks on a multiprocessor as are needed to take all at once, no more.
    together = -(-blocks // torch.cuda.get_device_properties(x.device).multi_processor_count)
    (first, gate1), (second, gate2) = (*branches, (None, 0), (None, 0))[:2]
    hopper.launch(
        function,
        blocks,
        32 * WARPS,
        _SHARED_BYTES // (together + 1),
        x.device,
        (
            x,
            first,
            second,
            out,
            modulation.table,
            modulation.entry,
            ctypes.c_longlong(modulation.table.stride(0)),
            *map(ctypes.c_int, (n * tokens, tokens, shift, scale, gate1, gate2)),
        ),
        overlap=overlap,
    )
    return out
