"""The split linear layer as a kernel for Hopper (hopper.cu)."""

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.kernels import cuda
from accel.kernels.split_linear.high_low import HighLow, split

FILE = Path(__file__).with_suffix(".cu")


class Tile(NamedTuple):
    """Compile-time shape of the kernel; hopper.cu documents the fields."""

    rows: int
    columns: int
    depth: int
    stages: int
    parts: int = 2

    @property
    def threads(self) -> int:
        return 2 * self.rows + 128

    @property
    def shared_bytes(self) -> int:
        return 1024 + self.stages * self.parts * 2 * self.depth * (self.rows + self.columns)


TILE = Tile(rows=128, columns=192, depth=64, stages=2)  # measured in log/split-kernels-h200.json
# Measured in log/h100/rae.json, all_families. FEW_ROWS gives the same bits as TILE.
FEW_ROWS = Tile(rows=64, columns=192, depth=64, stages=3)
HIGH_ONLY = Tile(rows=128, columns=192, depth=64, stages=4, parts=1)


def choose_tile(layer: Any, rows: int) -> Tile:
    """Return the tile for x (rows, K)."""
    if not layer.low:
        return HIGH_ONLY
    return FEW_ROWS if rows <= FEW_ROWS.rows else TILE


def source(result: int, tile: Tile = TILE) -> str:
    """Return the complete CUDA source of a variant.

    result: 0 for float32, 1 for high and low, 2 for GELU, then high and low.
    """
    return cuda.source(
        (FILE,),
        tile,
        cuda.wgmma("multiply", tile.columns, "f16"),
        "f16",
        RESULT=result,
        **cuda.registers(tile.rows // 64),
    )


@lru_cache(None)
def _kernel(result, tile, device):
    return cuda.Kernel(
        source(result, tile), "split_linear", tile.threads, tile.shared_bytes, device
    )


def arrange(weight: Tensor) -> Tensor:
    """Return weights (N, K) float32 as a pair with permuted rows, padded with zeros to N % 32 = 0.

    After a warpgroup MMA, a lane has columns 2c and 2c + 1 of every eight. With row 8c + 2j + i of
    W at 8j + 2c + i, it has eight neighbouring columns of every 32, which it stores at once.
    """
    n, k = weight.shape
    weight = torch.cat([weight, weight.new_zeros(-n % 32, k)])
    return split(weight.unflatten(0, (-1, 4, 4, 2)).transpose(1, 2).flatten(0, 3)).pair


def _pair_map(pair, box_rows, tile):
    """Return the tensor map of a pair (2, …, K). One load copies both parts of a tile."""
    depth = pair.shape[-1]
    rows = pair[0].numel() // depth
    return cuda.tensor_map(
        pair,
        sizes=(depth, rows, len(pair)),
        strides=(2 * depth, 2 * rows * depth),
        box=(tile.depth, box_rows, tile.parts),
        swizzle=128,
    )


def linear(layer: Any, x: HighLow, position: Tensor | None = None) -> Tensor | HighLow:
    """Launch the kernel: x HighLow (…, K) → (…, N), float32 or HighLow.

    position (t, N) replaces the bias: row r of x uses its row r % t. Run each shape once before
    capturing it in a graph.
    """
    fits = layer.depth % 8 == 0 and layer.columns % 8 == 0
    assert fits, "backend 'hopper' needs N and K in multiples of 8; use 'cublas'"
    pair = x.pair.contiguous()  # copies only a `new_stack`, the result of cuBLAS's attention
    device = pair.device
    shape = (*pair.shape[1:-1], layer.columns)
    if layer.high_low:
        out = torch.empty(2, *shape, dtype=torch.float16, device=device)
    else:
        out = torch.empty(shape, dtype=torch.float32, device=device)
    rows = pair[0].numel() // layer.depth
    tile = choose_tile(layer, rows)
    tiles = -(-rows // tile.rows) * -(-layer.columns // tile.columns)
    _kernel(layer.high_low + layer.gelu, tile, device).launch(
        min(tiles, cuda.multiprocessors(device)),
        _pair_map(pair, tile.rows, tile),
        _pair_map(layer.pair, tile.columns, tile),
        out,
        x.scale,
        layer.scale,
        layer.bias if position is None else position,
        layer.gelu_scale,
        layer.overflow,
        rows,
        layer.columns,
        layer.depth,
        1 if position is None else len(position),
    )
    return HighLow(out, None) if layer.high_low else out
