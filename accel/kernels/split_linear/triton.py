"""Triton kernels before and after a split GEMM; they use no tensor cores.

One splits rows into high and low. The other is the epilogue of a GEMM without one: it applies
scales, bias and GELU, checks for overflow and splits the result. Kernels of other ops also use the
device functions that store a split.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.kernels.split_linear.high_low import new_pair

TILE = {"ROWS": 16, "COLUMNS": 128, "num_warps": 4}


def finish(layer: Any, y: Tensor, row_scale: Tensor | None) -> Tensor:
    """Apply the epilogue to y (M, N) float32, in place, or return a pair (2, M, N) for high_low.

    After GELU the pair is a `new_stack`, because a GEMM follows; else it is contiguous, for
    attention. row_scale: (M,).
    """
    m, n = y.shape
    out = new_pair(m, n, device=y.device, stack=layer.gelu) if layer.high_low else y
    with torch.cuda.device_of(y):  # Triton launches on the current GPU
        _finish[(triton.cdiv(n, TILE["COLUMNS"]), triton.cdiv(m, TILE["ROWS"]))](
            y,
            out,
            row_scale,
            layer.scale,
            layer.bias,
            layer.gelu_scale,
            layer.overflow,
            m,
            n,
            out.stride(-2),  # from one row to the next
            out.stride(0) if layer.high_low else 0,  # from high to low
            SCALED=row_scale is not None,
            RESULT=layer.high_low + layer.gelu,
            **TILE,
        )
    return out


def split_rows(x: Tensor, pair: Tensor, scales: Tensor, stack: bool) -> None:
    """Split x (…, K) float32 into `pair` (2, …, K) and the rows' powers of two, `scales` (…,).

    stack: pair is a `new_stack`.
    """
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        _split_rows[(scales.numel(),)](
            x,
            pair,
            scales,
            x.numel(),  # from high to low
            STACK=stack,
            **row_config(x.shape[-1]),
        )


def split_columns(x: Tensor, pair: Tensor, scales: Tensor, stack: bool) -> None:
    """Compute `split_rows` for a column-major x (N, T, K), K ≤ 1024."""
    n, tokens, width = x.shape
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        _split_columns[(triton.cdiv(tokens, 16), n)](
            x,
            pair,
            scales,
            tokens,
            x.numel(),  # from high to low
            STACK=stack,
            TOKENS=16,
            **row_config(width) | {"num_warps": 8},
        )


def row_config(width: int) -> dict[str, int]:
    """Return launch constants for one program per row."""
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "BLOCK": block, "num_warps": min(16, max(1, block // 512))}


@triton.jit
def store_high_low(high_ptr, low_offset, y, inside):
    """Split y. Store high at high_ptr, and low at an offset of `low_offset` elements."""
    high = y.to(tl.float16)
    tl.store(high_ptr, high, inside)
    tl.store(high_ptr + low_offset, (y - high.to(tl.float32)).to(tl.float16), inside)


@triton.jit
def store_stack(high_ptr, depth, y, inside):
    """Split y. Store high, low and high again at offsets of 0, depth and 2·depth elements."""
    store_high_low(high_ptr, depth, y, inside)
    tl.store(high_ptr + 2 * depth, y.to(tl.float16), inside)


@triton.jit
def row_scale(largest):
    """Return the power of two that scales `largest` to between 2¹⁴ and 2¹⁵, and its inverse.

    Both are built from exponent bits.
    """
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15)
    factor = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    return factor, ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_row(pair_ptr, scale_ptr, row, column, y, low, WIDTH: tl.constexpr, STACK: tl.constexpr):
    """Split a row y, which is 0 beyond WIDTH; store its parts and its scale."""
    inside = column < WIDTH
    factor, inverse = row_scale(tl.max(tl.abs(y), 0))
    tl.store(scale_ptr + row, inverse)
    if STACK:
        store_stack(pair_ptr + row * (3 * WIDTH) + column, WIDTH, y * factor, inside)
    else:
        store_high_low(pair_ptr + row * WIDTH + column, low, y * factor, inside)


@triton.jit(do_not_specialize=["low"])
def _split_rows(
    x_ptr,
    pair_ptr,
    scale_ptr,
    low,
    STACK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Split a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * WIDTH + column, column < WIDTH, 0.0)
    store_row(pair_ptr, scale_ptr, row, column, x, low, WIDTH, STACK)


@triton.jit(do_not_specialize=["tokens", "low"])
def _split_columns(
    x_ptr,
    pair_ptr,
    scale_ptr,
    tokens,
    low,
    STACK: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Split TOKENS rows of a sample."""
    sample = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK)
    here = token < tokens
    inside = (column < WIDTH)[:, None] & here[None, :]
    place = sample * WIDTH * tokens + column[:, None] * tokens + token[None, :]
    y = tl.trans(tl.load(x_ptr + place, inside, 0.0))  # (TOKENS, BLOCK)
    inside = here[:, None] & (column < WIDTH)[None, :]
    factor, inverse = row_scale(tl.max(tl.abs(y), 1))
    row = sample * tokens + token
    tl.store(scale_ptr + row, inverse, here)
    y = y * factor[:, None]
    if STACK:
        store_stack(pair_ptr + row[:, None] * (3 * WIDTH) + column[None, :], WIDTH, y, inside)
    else:
        store_high_low(pair_ptr + row[:, None] * WIDTH + column[None, :], low, y, inside)


@triton.jit
def _gelu(y):
    """Compute tanh-GELU."""
    return y / (1 + tl.exp(tl.minimum(-1.5957691216 * (y + 0.044715 * y * y * y), 87.0)))


@triton.jit(do_not_specialize=["rows"])
def _finish(
    y_ptr,
    out_ptr,
    row_scale_ptr,
    scale_ptr,
    bias_ptr,
    gelu_scale_ptr,
    overflow_ptr,
    rows,
    columns,
    out_row,
    out_low,
    SCALED: tl.constexpr,
    RESULT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Apply the epilogue to a tile. RESULT: 0 float32, 1 high/low, 2 GELU, then high/low/high."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_row = row < rows
    in_column = column < columns
    inside = in_row[:, None] & in_column[None, :]
    y = tl.load(y_ptr + row.to(tl.int64)[:, None] * columns + column[None, :], inside, 0.0)
    scale = tl.load(scale_ptr + column, in_column, 0.0)[None, :]
    if SCALED:
        scale = scale * tl.load(row_scale_ptr + row, in_row, 0.0)[:, None]
    y = y * scale + tl.load(bias_ptr + column, in_column, 0.0)[None, :]
    out_ptr += row.to(tl.int64)[:, None] * out_row + column[None, :]
    if RESULT == 0:
        tl.store(out_ptr, y, inside)
    if RESULT == 1:
        store_high_low(out_ptr, out_low, y, inside)
    if RESULT == 2:
        y = _gelu(y) * tl.load(gelu_scale_ptr + column, in_column, 0.0)[None, :]
        store_stack(out_ptr, out_low, y, inside)
    if RESULT > 0:
        beyond = tl.max(tl.max((inside & (tl.abs(y) > 65504.0)).to(tl.int32), 1), 0)
        tl.store(overflow_ptr, 1, beyond > 0)
