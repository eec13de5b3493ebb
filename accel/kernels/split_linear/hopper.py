"""Split products on Hopper (split_linear.cu, split_attention.cu), which accel.kernels.split_linear and split_attention choose there."""

import ctypes
import math
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from accel.kernels import cuda as hopper
from accel.kernels.attention.hopper import HEAD_DIM, packed_map

LINEAR, ATTENTION = (Path(__file__).parents[1] / f"split_{name}" / "hopper.cu" for name in ("linear", "attention"))


class Tile(NamedTuple):
    """Compile-time shape of split_linear.cu, which says what each means."""

    rows: int
    columns: int
    depth: int
    stages: int
    promote: int

    @property
    def threads(self):
        return 2 * self.rows + 128

    @property
    def shared_bytes(self):
        return 1024 + self.stages * 4 * self.depth * (self.rows + self.columns)


# Measured on an H200 (log/split-kernels-h200.json), as CONFIG below.
TILE = Tile(rows=128, columns=192, depth=64, stages=2, promote=1)


def linear_source(tile, result):
    constants = dict(
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        STAGES=tile.stages,
        PROMOTE=tile.promote,
        RESULT=result,
        **hopper.registers(tile.rows // 64),
    )
    return hopper.text(
        LINEAR,
        constants,
        hopper.product("multiply", tile.columns, "f16", False, False, False),
        hopper.conversions("f16"),
    )


@lru_cache(None)
def _linear(tile, result, device):
    return hopper.load(linear_source(tile, result), LINEAR.name, "split_linear", tile.shared_bytes, device)


def arrange(weight):
    """Rows of W (N, K) as the kernel wants them, N filled up with zeros to a multiple of 32. A lane of a warpgroup product holds columns
    2c, 2c + 1 of each eight; with rows 8c + 2j + i of W at 8j + 2c + i, four eights give it eight columns side by side to store."""
    n, k = weight.shape
    weight = torch.cat([weight, weight.new_zeros(-n % 32, k)])
    return weight.unflatten(0, (-1, 4, 4, 2)).transpose(1, 2).flatten(0, 3)


@lru_cache(4096)
def _pair_map(pointer, rows, depth, box_rows, box_depth):
    """Two terms (2, rows, depth), of which one copy takes both of a tile."""
    return hopper.tensor_map(
        pointer,
        torch.float16,
        (depth, rows, 2),
        (2 * depth, 2 * rows * depth),
        (box_depth, box_rows, 2),
        hopper.SWIZZLE_128 if box_depth == 64 else hopper.SWIZZLE_64,
    )


def linear_hopper(a, row_scale, b, scale, bias, after, overflow, out, result, tile=None):
    """a (2, …, K), b (2, N', K) from `arrange`, float16; row_scale (…,) or None, scale, bias, after (N,) float32; out (…, N) float32 for result 0,
    (2, …, N) float16 for 1 and, after GELU, 2. Meet a shape once before capturing it in a graph."""
    depth, columns = a.shape[-1], len(bias)
    if depth % 8 or columns % 8:
        raise ValueError(f"split: route 'hopper' takes sides in eights, not {depth} to {columns}; take 'triton'")
    if not all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in (a, b, out)):
        raise ValueError("split: route 'hopper' takes contiguous tensors that start at a multiple of 16 bytes")
    rows = a[0].numel() // depth
    tile = tile or TILE
    tiles = -(-rows // tile.rows) * -(-columns // tile.columns)
    if not tiles:
        return
    count = torch.cuda.get_device_properties(a.device).multi_processor_count
    hopper.launch(
        _linear(tile, result, a.device),
        min(tiles, count),
        tile.threads,
        tile.shared_bytes,
        a.device,
        (
            _pair_map(a.data_ptr(), rows, depth, tile.rows, tile.depth),
            _pair_map(b.data_ptr(), b.shape[1], depth, tile.columns, tile.depth),
            out,
            row_scale,
            scale,
            bias,
            after,
            overflow,
            *map(ctypes.c_int, (rows, columns, depth)),
        ),
    )


#################################################################################
#                                   Attention                                   #
#################################################################################


class Config(NamedTuple):
    """Compile-time shape of split_attention.cu, which says what each means."""

    warpgroups: int
    keys: int
    stages: int
    q_buffers: int

    @property
    def threads(self):
        return 128 * (self.warpgroups + 1)

    @property
    def shared_bytes(self):
        return 1024 + self.q_buffers * 2 * 64 * self.warpgroups * 160 + self.stages * 2 * self.keys * (160 + 256)


CONFIG = Config(warpgroups=2, keys=64, stages=3, q_buffers=1)


def attention_source(config):
    constants = dict(
        HEAD=HEAD_DIM,
        KEYS=config.keys,
        WARPGROUPS=config.warpgroups,
        STAGES=config.stages,
        Q_BUFFERS=config.q_buffers,
        **hopper.registers(config.warpgroups),
    )
    return hopper.text(
        ATTENTION,
        constants,
        hopper.product("multiply_qk", config.keys, "f16", False, False, False),
        hopper.product("multiply_pv", HEAD_DIM, "f16", True, False, True),
        hopper.conversions("f16"),
    )


@lru_cache(None)
def _attention(config, device):
    return hopper.load(attention_source(config), ATTENTION.name, "split_attention", config.shared_bytes, device)


def attention_hopper(pair, num_heads, config=None):
    """pair (2, N, T, 3·H·72) float16, contiguous → (2, N, T, H·72). Meet a shape once before capturing it in a graph."""
    _, n, tokens, width = pair.shape
    if width != 3 * num_heads * HEAD_DIM or not pair.is_contiguous() or pair.data_ptr() % 16:
        raise ValueError(
            f"attention: route 'hopper' takes a contiguous tensor with head dim {HEAD_DIM}, aligned to 16 bytes; take 'triton'"
        )
    config = config or CONFIG
    out = torch.empty(2, n, tokens, width // 3, dtype=torch.float16, device=pair.device)
    items = n * num_heads * -(-tokens // (64 * config.warpgroups))
    if not items:
        return out
    main, rest = (
        packed_map(pair.data_ptr(), pair.dtype, 2 * n, tokens, 3 * num_heads, columns, swizzle)
        for columns, swizzle in ((64, hopper.SWIZZLE_128), (16, hopper.SWIZZLE_32))
    )
    count = torch.cuda.get_device_properties(pair.device).multi_processor_count
    hopper.launch(
        _attention(config, pair.device),
        min(items, count),
        config.threads,
        config.shared_bytes,
        pair.device,
        (
            main,
            rest,
            out,
            ctypes.c_int(n),
            ctypes.c_int(tokens),
            ctypes.c_int(num_heads),
            ctypes.c_int(items),
            ctypes.c_float(1 / (math.sqrt(HEAD_DIM) * math.log(2))),
        ),
    )  # scale of a score in powers of two
    return out


def compile_ahead(device):
    """Load the kernels on a device, compiled if they are not on disk yet."""
    device = torch.empty(0, device=device).device  # with its number, as tensors name it
    for result in range(3):
        _linear(TILE, result, device)
    _attention(CONFIG, device)
