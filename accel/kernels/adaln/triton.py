"""adaLN as a Triton kernel, for any GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from accel.kernels import gpu
from accel.kernels.adaln.reference import EPS, Branches, Modulation
from accel.kernels.split_linear.triton import row_scale, store_high_low, store_stack


def launch(
    x: Tensor,
    modulation: Modulation,
    shift: int,
    branches: Branches,
    rms_eps: float | None,
    out: Tensor,
    scales: Tensor | None = None,
    stack: bool = False,
) -> None:
    """Launch the kernel of accel.kernels.adaln.adaln for a float32 x; out has x's shape.

    With scales (N, T) float32, launch the kernel of adaln_split: out is then a pair, and with
    `stack` a `new_stack`.
    """
    n, tokens, width = x.shape
    unused = (x, 0)
    first, second = (*branches, unused, unused)[:2]
    by_token = modulation.entry.ndim == 2
    # Tokens with separate entries share no vectors, so a program computes one token.
    config = tile_config(width, 1 if by_token else n * tokens)
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        _adaln[(triton.cdiv(tokens, config["TURNS"]), n)](
            x,
            first[0],
            second[0],
            out,
            out if scales is None else scales,
            modulation.table,
            modulation.entry,
            tokens,
            modulation.table.stride(0),
            x.numel(),  # from high to low
            shift,
            shift + 1,
            first[1],
            second[1],
            WIDTH=width,
            BRANCHES=len(branches),
            HIGH_LOW=scales is not None,
            STACK=stack,
            EPS=EPS if rms_eps is None else rms_eps,
            CENTRE=rms_eps is None,
            BY_TOKEN=by_token,
            START_NEXT=gpu.capability(x.device) >= (9, 0),  # programmatic dependent launch
            **config,
        )


def tile_config(width: int, tokens: int = 16384) -> dict[str, int]:
    """Return launch constants for `tokens` tokens of all samples.

    Two power-of-two tiles cover a token, e.g. 1152 = 1024 + 128; a single one of 2048 would leave
    44 % of the lanes idle. There is one warp per 1024 columns, so that sums need no barrier and
    many tokens are in flight on a multiprocessor. A program loads the modulation once and computes
    two tokens of a sample, if there are enough tokens to keep every multiprocessor busy.
    """
    main = 1 << (width.bit_length() - 1)
    tail = 1 << (width - main - 1).bit_length() if width > main else 0
    return {
        "MAIN": main,
        "TAIL": tail,
        "TURNS": 2 if tokens >= 2048 else 1,
        "num_warps": max(1, main // 1024),
    }


@triton.jit
def _sum(x_ptr, first_ptr, second_ptr, offset, inside, gate1, gate2, BRANCHES: tl.constexpr):
    """Return a tile of x + Σ gate·branch.

    Loads are cast immediately, because Triton's interpreter has no bfloat16 arithmetic.
    """
    total = tl.load(x_ptr + offset, inside, 0.0)
    if BRANCHES > 0:
        total += gate1 * tl.load(first_ptr + offset, inside, 0.0).to(tl.float32)
    if BRANCHES > 1:
        total += gate2 * tl.load(second_ptr + offset, inside, 0.0).to(tl.float32)
    return total


@triton.jit
def _vectors(
    start, column, inside, shift, scale, gate1, gate2, WIDTH: tl.constexpr, BRANCHES: tl.constexpr
):
    """Return tiles of shift, 1 + scale and the gates in use, in float32."""
    shift = tl.load(start + shift * WIDTH + column, inside, 0.0).to(tl.float32)
    scale = 1 + tl.load(start + scale * WIDTH + column, inside, 0.0).to(tl.float32)
    first = shift
    second = shift
    if BRANCHES > 0:
        first = tl.load(start + gate1 * WIDTH + column, inside, 0.0).to(tl.float32)
    if BRANCHES > 1:
        second = tl.load(start + gate2 * WIDTH + column, inside, 0.0).to(tl.float32)
    return shift, scale, first, second


# Vector indices have 170 values on XL, and half a batch may start at an odd entry. If Triton
# specialised on their divisibility, it would compile the kernel many times.
@triton.jit(do_not_specialize=["entry_ptr", "tokens", "low", "shift", "scale", "gate1", "gate2"])
def _adaln(
    x_ptr,
    first_ptr,
    second_ptr,
    out_ptr,
    token_scale_ptr,
    table_ptr,
    entry_ptr,
    tokens,
    entry_stride,
    low,
    shift,
    scale,
    gate1,
    gate2,
    WIDTH: tl.constexpr,
    BRANCHES: tl.constexpr,
    HIGH_LOW: tl.constexpr,
    STACK: tl.constexpr,
    EPS: tl.constexpr,
    CENTRE: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    TURNS: tl.constexpr,
    START_NEXT: tl.constexpr,
):
    if START_NEXT:
        gdc_launch_dependents()
    sample = tl.program_id(1)
    entry = entry_ptr + sample
    if BY_TOKEN:  # a program computes one token
        entry = entry_ptr + sample.to(tl.int64) * tokens + tl.program_id(0)
    start = table_ptr + tl.load(entry) * entry_stride
    main = tl.arange(0, MAIN)
    in_main = main < WIDTH
    shift_m, scale_m, gate1_m, gate2_m = _vectors(
        start, main, in_main, shift, scale, gate1, gate2, WIDTH, BRANCHES
    )
    if TAIL:
        tail = MAIN + tl.arange(0, TAIL)
        in_tail = tail < WIDTH
        shift_t, scale_t, gate1_t, gate2_t = _vectors(
            start, tail, in_tail, shift, scale, gate1, gate2, WIDTH, BRANCHES
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
        if BRANCHES == 2:
            tl.store(x_ptr + row + main, x, here_m)
            if TAIL:
                tl.store(x_ptr + row + tail, x_t, here_t)
        if CENTRE:
            x = tl.where(in_main, x - total / WIDTH, 0.0)
        square = tl.sum(x * x, 0)
        if TAIL:
            if CENTRE:
                x_t = tl.where(in_tail, x_t - total / WIDTH, 0.0)
            square += tl.sum(x_t * x_t, 0)
        scaling = tl.rsqrt(square / WIDTH + EPS)
        y = x * scaling * scale_m + shift_m
        if TAIL:
            y_t = x_t * scaling * scale_t + shift_t
        if HIGH_LOW:
            largest = tl.max(tl.abs(y), 0)
            if TAIL:
                largest = tl.maximum(largest, tl.max(tl.abs(y_t), 0))
            factor, inverse = row_scale(largest)
            tl.store(token_scale_ptr + row // WIDTH, inverse, token < tokens)
            if STACK:
                store_stack(out_ptr + 3 * row + main, WIDTH, y * factor, here_m)
                if TAIL:
                    store_stack(out_ptr + 3 * row + tail, WIDTH, y_t * factor, here_t)
            else:
                store_high_low(out_ptr + row + main, low, y * factor, here_m)
                if TAIL:
                    store_high_low(out_ptr + row + tail, low, y_t * factor, here_t)
        else:
            tl.store(out_ptr + row + main, y.to(out_ptr.dtype.element_ty), here_m)
            if TAIL:
                tl.store(out_ptr + row + tail, y_t.to(out_ptr.dtype.element_ty), here_t)
