"""The split linear layer by a Triton kernel, from sm_80 on."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.kernels import cuda
from accel.kernels.split_linear.high_low import HighLow

TILE = dict(ROWS=128, COLUMNS=128, DEPTH=32, num_warps=8, num_stages=3)


def stages(tensor: Tensor, unmasked: bool) -> dict[str, int]:
    """Launch options of a loop: from Hopper on, one with masked loads goes without asynchronous copies.

    With them a network of 64 tokens was off by 6 % on an H200 (Triton 3.6), without them it is right. A likely cause:
    no fence stands between the zeros that such a copy fills in and the MMA that reads them.
    """
    return {} if unmasked or cuda.capability(tensor.device) < (9, 0) else dict(num_stages=1)


def linear(layer: Any, x: HighLow, out: Tensor) -> None:
    """x HighLow (…, K) → out (…, N) float32, or (2, …, N) float16."""
    m, config = x.pair[0].numel() // layer.depth, {**TILE, **stages(x.pair, layer.depth % TILE["DEPTH"] == 0)}
    blocks = triton.cdiv(m, config["ROWS"]) * triton.cdiv(layer.columns, config["COLUMNS"])
    row_scale = layer.scale if x.scale is None else x.scale
    after = layer.bias if layer.after is None else layer.after
    overflow = layer.scale if layer.overflow is None else layer.overflow
    tensors = x.pair, layer.pair, out, row_scale, layer.scale, layer.bias, after, overflow
    numbers = m, layer.columns, m * layer.depth, m * layer.columns, layer.depth
    variant = dict(SCALED=x.scale is not None, RESULT=layer.high_low + layer.gelu, WATCHED=layer.overflow is not None)
    with torch.cuda.device_of(out):  # Triton launches on the current GPU
        _split_linear[(blocks,)](*tensors, *numbers, **variant, **config)


@triton.jit
def store_high_low(high_ptr, low_offset, y, inside):
    """Split y, and store high, and low `low_offset` elements further."""
    high = y.to(tl.float16)
    tl.store(high_ptr, high, inside)
    tl.store(high_ptr + low_offset, (y - high.to(tl.float32)).to(tl.float16), inside)


@triton.jit
def store_stack(high_ptr, depth, y, inside):
    """Split y, and store high, low `depth` elements further, and high again as far behind that."""
    store_high_low(high_ptr, depth, y, inside)
    tl.store(high_ptr + 2 * depth, y.to(tl.float16), inside)


@triton.jit
def gelu(y):
    """In its tanh form."""
    return y / (1 + tl.exp(tl.minimum(-1.5957691216 * (y + 0.044715 * y * y * y), 87.0)))


@triton.jit
def _split_linear(
    a_ptr,
    b_ptr,
    out_ptr,
    row_scale_ptr,
    scale_ptr,
    bias_ptr,
    after_ptr,
    overflow_ptr,
    rows,
    columns,
    a_low,
    out_low,
    depth: tl.constexpr,
    SCALED: tl.constexpr,
    RESULT: tl.constexpr,
    WATCHED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """RESULT: 0 float32, 1 high and low, 2 GELU, high and low. WATCHED: overflow is reported."""
    across = tl.cdiv(columns, COLUMNS)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, DEPTH)
    in_row, in_column = row < rows, column < columns
    a_ptr += row.to(tl.int64)[:, None] * depth + inner[None, :]
    b_ptr += column[None, :] * depth + inner[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        a_inside = in_row[:, None] & (start + inner < depth)[None, :]
        b_inside = in_column[None, :] & (start + inner < depth)[:, None]
        a_high = tl.load(a_ptr + start, a_inside, 0.0)
        a_low_part = tl.load(a_ptr + a_low + start, a_inside, 0.0)
        b_high = tl.load(b_ptr + start, b_inside, 0.0)
        b_low_part = tl.load(b_ptr + columns * depth + start, b_inside, 0.0)
        part = tl.dot(a_low_part, b_high)
        part = tl.dot(a_high, b_low_part, part)
        part = tl.dot(a_high, b_high, part)
        total += part
    scale = tl.load(scale_ptr + column, in_column, 0.0)[None, :]
    if SCALED:
        scale = scale * tl.load(row_scale_ptr + row, in_row, 0.0)[:, None]
    y = total * scale + tl.load(bias_ptr + column, in_column, 0.0)[None, :]
    inside = in_row[:, None] & in_column[None, :]
    out_ptr += row.to(tl.int64)[:, None] * columns + column[None, :]
    if RESULT == 2:
        y = gelu(y) * tl.load(after_ptr + column, in_column, 0.0)[None, :]
    if RESULT == 0:
        tl.store(out_ptr, y, inside)
    else:
        store_high_low(out_ptr, out_low, y, inside)
        if WATCHED:
            beyond = tl.max(tl.max((inside & (tl.abs(y) > 65504.0)).to(tl.int32), 1), 0)
            tl.store(overflow_ptr, 1, beyond > 0)
