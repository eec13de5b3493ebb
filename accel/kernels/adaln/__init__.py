"""The row kernel: gates, residual, LayerNorm and adaptive modulation in one pass over the tokens.

adaLN-Zero (Peebles & Xie 2023, arXiv:2212.09748, section 3.2) puts between two products

    x ← x + Σᵢ gateᵢ · branchᵢ        h = (x − mean(x)) / √(var(x) + ε) · (1 + scale) + shift

which as separate operations reads and writes the float32 residual stream many times over. Here an element is loaded once, the sum and
both statistics stay in registers (variance from the centred values: E[x²] − mean² cancels), and h leaves in the dtype that the
next product takes, or as two float16 terms with a power of two a row (accel.kernels.split_linear). Shifts, scales and gates come from a table by
an index on the device, so that one captured graph serves every step.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from accel.kernels.adaln import hopper as norm_hopper
from accel.kernels.split_linear import Terms, split

try:
    import triton
    import triton.language as tl
except ImportError:  # not on every platform; the twin is then the only route
    triton = None

EPS = 1e-6


class Modulation(NamedTuple):
    """Where a sample finds its shift, scale and gate vectors: ``table[entry[sample], vector]``."""

    table: torch.Tensor  # (E, V, D) contiguous: pairs of timestep and label, vectors, width
    entry: torch.Tensor  # (N,) int64, on the table's device


def norm_modulate(x, modulation, shift, scale, branches=(), update=False, dtype=None, route="auto"):
    """LayerNorm(x + Σ gate·branch)·(1 + scale) + shift; the norm has no parameters and ε = 1e-6.

    x (N, T, D) is the residual stream, `branches` holds up to two pairs (branch (N, T, D), index of its gate); `shift`, `scale` and the
    gates are vector indices into `modulation.table`. With `update` the sum is written back to x. Returns (N, T, D) in `dtype`
    (x's if not given), or Terms with a scale a row for dtype "terms" (x float32).

    `route`: "triton" (x and table float32, all contiguous), "hopper" (the same for few rows on Hopper, half branches and result), "torch" (the
    plain twin, any dtype), or "auto": triton for float32 on a GPU, hopper where it applies and wins.
    """
    dtype = dtype or x.dtype
    if route == "auto":
        route = (
            "torch"
            if not (triton and x.is_cuda and x.dtype == torch.float32)
            else "hopper"
            if x.shape[0] * x.shape[1] <= norm_hopper.ROWS and not _refused(x, modulation, branches, dtype)
            else "triton"
        )
    return {"triton": _triton, "hopper": _hopper, "torch": _torch}[route](
        x, modulation, shift, scale, tuple(branches), update, dtype
    )


def _torch(x, modulation, shift, scale, branches, update, dtype):
    def vector(index):
        return modulation.table[modulation.entry, index].unsqueeze(1)  # (N, 1, D)

    total = x
    for branch, gate in branches:
        total = torch.addcmul(total, vector(gate), branch.to(x.dtype))
    if update:
        x.copy_(total)
    normed = F.layer_norm(total, total.shape[-1:], eps=EPS)
    out = torch.addcmul(vector(shift), normed, 1 + vector(scale))
    return split(out) if dtype == "terms" else out.to(dtype)


def _refused(x, modulation, branches, dtype):
    return norm_hopper.refusal(x, modulation.table, [branch for branch, _ in branches], dtype)


def _hopper(x, modulation, shift, scale, branches, update, dtype):
    if reason := _refused(x, modulation, branches, dtype):
        raise ValueError(f"norm: route 'hopper' {reason}; take 'triton'")
    if not all(tensor.is_contiguous() for tensor in (x, modulation.table, *(branch for branch, _ in branches))):
        raise ValueError("the row kernel takes contiguous tensors")
    return norm_hopper.norm_hopper(x, modulation, shift, scale, branches, update, dtype, EPS)


def _triton(x, modulation, shift, scale, branches, update, dtype):
    table, entry = modulation
    if triton is None:
        raise RuntimeError("the row kernel needs Triton: pip install triton, or take route='torch'")
    if x.dtype != torch.float32 or table.dtype != torch.float32:
        raise TypeError(f"the row kernel takes a float32 residual and table, got {x.dtype} and {table.dtype}")
    if not all(tensor.is_contiguous() for tensor in (x, table, *(branch for branch, _ in branches))):
        raise ValueError("the row kernel takes contiguous tensors")
    n, tokens, width = x.shape
    if terms := dtype == "terms":
        out, row_scale = (
            torch.empty(2, *x.shape, dtype=torch.float16, device=x.device),
            torch.empty(n, tokens, device=x.device),
        )
    else:
        out = row_scale = torch.empty_like(x, dtype=dtype)
    (first, gate1), (second, gate2) = (*branches, (x, 0), (x, 0))[:2]
    config = tile_config(width, n * tokens)
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        _norm_modulate[(triton.cdiv(tokens, config["TURNS"]), n)](
            x,
            first,
            second,
            out,
            row_scale,
            table,
            entry,
            tokens,
            table.stride(0),
            n * tokens * width,
            shift,
            scale,
            gate1,
            gate2,
            WIDTH=width,
            BRANCHES=len(branches),
            UPDATE=update,
            TERMS=terms,
            EPS=EPS,
            **config,
            START_NEXT=_can_start_next(x.device),
        )
    return Terms(out, row_scale) if terms else out


@lru_cache(None)
def _can_start_next(device):
    """Whether a kernel there can let the next one be set up beside it (programmatic dependent launch), where Triton has the instruction."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0) and start_next is not None


def tile_config(width, rows=16384):
    """Launch constants. Two power-of-two tiles cover a row, 1152 = 1024 + 128: one of 2048 would leave 44 % of the lanes idle. One warp to
    1024 columns: the sums then need no barrier, and many rows are in flight on a multiprocessor. A program takes
    two rows of a sample in turn, with the modulation loaded once, as long as every multiprocessor still gets several programs."""
    main = 1 << (width.bit_length() - 1)
    tail = 1 << (width - main - 1).bit_length() if width > main else 0
    return dict(MAIN=main, TAIL=tail, TURNS=2 if rows >= 2048 else 1, num_warps=max(1, main // 1024))


def compile_ahead(width, rows, dtype, device):
    """Compile, or fetch from Triton's disk cache, the variants that a network of `width` needs for `rows` tokens with products in `dtype`;
    seconds of work with an empty cache, made for a thread beside the loading of weights."""
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        x = torch.zeros(1, rows, width, device=device)
        branch = torch.zeros_like(x, dtype=x.dtype if dtype == "terms" else dtype)
        modulation = Modulation(
            torch.zeros(1, 1, width, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        )
        for branches, result in ((0, dtype), (1, dtype), (2, dtype), (2, torch.float32)):
            norm_modulate(x, modulation, 0, 0, ((branch, 0),) * branches, branches == 2, result)
        torch.cuda.current_stream().synchronize()


if triton:
    try:
        from triton.language.extra.cuda import gdc_launch_dependents as start_next
    except ImportError:  # Triton before 3.4, with torch 2.7
        start_next = None

    @triton.jit
    def _sum(x_ptr, first_ptr, second_ptr, offset, inside, gate1, gate2, BRANCHES: tl.constexpr):
        """A tile of x + Σ gate·branch. Loads are cast at once: Triton's interpreter has no bfloat16 arithmetic."""
        total = tl.load(x_ptr + offset, inside, 0.0)
        if BRANCHES > 0:
            total += gate1 * tl.load(first_ptr + offset, inside, 0.0).to(tl.float32)
        if BRANCHES > 1:
            total += gate2 * tl.load(second_ptr + offset, inside, 0.0).to(tl.float32)
        return total

    @triton.jit
    def _vectors(vector_ptr, column, inside, shift, scale, gate1, gate2, WIDTH: tl.constexpr, BRANCHES: tl.constexpr):
        """A tile of shift, 1 + scale and the gates in use."""
        shift = tl.load(vector_ptr + shift * WIDTH + column, inside, 0.0)
        scale = 1 + tl.load(vector_ptr + scale * WIDTH + column, inside, 0.0)
        first, second = shift, shift
        if BRANCHES > 0:
            first = tl.load(vector_ptr + gate1 * WIDTH + column, inside, 0.0)
        if BRANCHES > 1:
            second = tl.load(vector_ptr + gate2 * WIDTH + column, inside, 0.0)
        return shift, scale, first, second

    @triton.jit
    def _store_terms(high_ptr, term, y, inside):
        high = y.to(tl.float16)
        tl.store(high_ptr, high, inside)
        tl.store(high_ptr + term, (y - high.to(tl.float32)).to(tl.float16), inside)

    # The vector indices take 170 values on XL, and a half of the batch may start at an odd entry: specialised on their divisibility, the kernel
    # would be compiled many times over.
    @triton.jit(do_not_specialize=["entry_ptr", "tokens", "term", "shift", "scale", "gate1", "gate2"])
    def _norm_modulate(
        x_ptr,
        first_ptr,
        second_ptr,
        out_ptr,
        row_scale_ptr,
        table_ptr,
        entry_ptr,
        tokens,
        entry_stride,
        term,
        shift,
        scale,
        gate1,
        gate2,
        WIDTH: tl.constexpr,
        BRANCHES: tl.constexpr,
        UPDATE: tl.constexpr,
        TERMS: tl.constexpr,
        EPS: tl.constexpr,
        MAIN: tl.constexpr,
        TAIL: tl.constexpr,
        TURNS: tl.constexpr,
        START_NEXT: tl.constexpr,
    ):
        if START_NEXT:
            start_next()
        sample = tl.program_id(1)
        vector_ptr = table_ptr + tl.load(entry_ptr + sample) * entry_stride
        main = tl.arange(0, MAIN)
        in_main = main < WIDTH
        shift_m, scale_m, gate1_m, gate2_m = _vectors(
            vector_ptr, main, in_main, shift, scale, gate1, gate2, WIDTH, BRANCHES
        )
        if TAIL:
            tail = MAIN + tl.arange(0, TAIL)
            in_tail = tail < WIDTH
            shift_t, scale_t, gate1_t, gate2_t = _vectors(
                vector_ptr, tail, in_tail, shift, scale, gate1, gate2, WIDTH, BRANCHES
            )
        for turn in range(TURNS):
            token = tl.program_id(0) * TURNS + turn
            row = (sample.to(tl.int64) * tokens + token) * WIDTH
            here_m = in_main & (token < tokens)
            x = _sum(x_ptr, first_ptr, second_ptr, row + main, here_m, gate1_m, gate2_m, BRANCHES)
            total = tl.sum(x, 0)
            if TAIL:
                here_t = in_tail & (token < tokens)
                x_t = _sum(x_ptr, first_ptr, second_ptr, row + tail, here_t, gate1_t, gate2_t, BRANCHES)
                total += tl.sum(x_t, 0)
            if UPDATE:
                tl.store(x_ptr + row + main, x, here_m)
                if TAIL:
                    tl.store(x_ptr + row + tail, x_t, here_t)
            x = tl.where(in_main, x - total / WIDTH, 0.0)
            square = tl.sum(x * x, 0)
            if TAIL:
                x_t = tl.where(in_tail, x_t - total / WIDTH, 0.0)
                square += tl.sum(x_t * x_t, 0)
            scaling = tl.rsqrt(square / WIDTH + EPS)
            y = x * scaling * scale_m + shift_m
            if TAIL:
                y_t = x_t * scaling * scale_t + shift_t
            if TERMS:
                largest = tl.max(tl.abs(y), 0)
                if TAIL:
                    largest = tl.maximum(largest, tl.max(tl.abs(y_t), 0))
                # From the largest value's exponent bits: its row's power of two, and the inverse, which brings it between 2¹⁴ and 2¹⁵.
                exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15)
                factor = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
                tl.store(
                    row_scale_ptr + row // WIDTH, ((exponent - 14) << 23).to(tl.float32, bitcast=True), token < tokens
                )
                _store_terms(out_ptr + row + main, term, y * factor, here_m)
                if TAIL:
                    _store_terms(out_ptr + row + tail, term, y_t * factor, here_t)
            else:
                tl.store(out_ptr + row + main, y.to(out_ptr.dtype.element_ty), here_m)
                if TAIL:
                    tl.store(out_ptr + row + tail, y_t.to(out_ptr.dtype.element_ty), here_t)
