"""Attention at head dim 72 on Hopper: attention_hopper.cu. An exact product needs no padding here
(72 is 80 in q·kᵀ and 72 in p·v), where libraries compute 96 or 128 columns.
"""

import ctypes
import math
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from accel.kernels import cuda as hopper

SOURCE = Path(__file__).with_suffix(".cu")
HEAD_DIM = 72


class Config(NamedTuple):
    """Compile-time shape of the kernel; attention_hopper.cu says what each means."""

    warpgroups: int
    keys: int
    stages: int
    blocks: int
    pipelined: bool = False

    @property
    def threads(self):
        return 128 * (self.warpgroups + 1)

    @property
    def shared_bytes(self):
        """Barriers, two tiles of queries, and the stages of keys and values."""
        return 1024 + 2 * 64 * self.warpgroups * 160 + self.stages * self.keys * (160 + 256)


# Measured on an H200 (log/attention-h200.json, log/products-few-rows-h200.json): blocks of 256 queries read keys and values half as often as blocks of 128, but leave warpgroups
# idle, or multiprocessors, where there are few queries: one picture's on one of several GPUs.
LONG, SHORT, SINGLE = (
    Config(warpgroups=4, keys=64, stages=4, blocks=1, pipelined=True),
    Config(warpgroups=2, keys=64, stages=2, blocks=2),
    Config(warpgroups=1, keys=64, stages=3, blocks=2),
)
SHORT_TOKENS = 256


def choose(heads, queries, multiprocessors):
    """The configuration for so many heads (of all samples) with so many queries each: the largest blocks of which there are enough for every
    multiprocessor, nearly."""

    def enough(config):
        return heads * -(-queries // (64 * config.warpgroups)) >= 0.75 * multiprocessors

    if queries > SHORT_TOKENS and enough(LONG):
        return LONG
    return SHORT if enough(SHORT) else SINGLE


def source(config, dtype):
    """The whole CUDA text for one configuration and dtype."""
    half = hopper.HALF[dtype]
    constants = dict(
        HEAD=HEAD_DIM,
        KEYS=config.keys,
        WARPGROUPS=config.warpgroups,
        STAGES=config.stages,
        BLOCKS=config.blocks,
        PIPELINED=int(config.pipelined),
        **hopper.registers(config.warpgroups, blocks=config.blocks),
    )
    return hopper.text(
        SOURCE,
        constants,
        hopper.product("multiply_qk", config.keys, half, False, False, False),
        hopper.product("multiply_pv", HEAD_DIM, half, True, True, True),
        hopper.conversions(half),
    )


def compile_cubin(config, dtype):
    """Machine code for sm_90a; needs no GPU."""
    return hopper.compile_cubin(source(config, dtype), SOURCE.name)


@lru_cache(None)
def _kernel(config, dtype, device):
    """The kernel loaded on a device, and how many blocks fill that."""
    function = hopper.load(source(config, dtype), SOURCE.name, "attention", config.shared_bytes, device)
    return function, torch.cuda.get_device_properties(device).multi_processor_count * config.blocks


BOX_ROWS = 32


def packed_map(pointer, dtype, n, tokens, parts, columns, swizzle):
    """How the copy engine sees the packed tensor: (N, T, 3·H, d), of which one copy takes (1, 32, 1, columns)."""
    row = HEAD_DIM * 2
    return hopper.tensor_map(
        pointer,
        dtype,
        (HEAD_DIM, parts, tokens, n),
        (row, parts * row, tokens * parts * row),
        (columns, 1, BOX_ROWS, 1),
        swizzle,
    )


def attention_hopper(qkv, num_heads, config=None, kv=None):
    """softmax(q·kᵀ/√72)·v per head; softmax in float32, p in half (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).

    qkv (N, T, 3·H·72) float16 or bfloat16, contiguous, on a GPU of capability 9.0 → out (N, T, H·72) and the natural log-sum-exp of the scaled
    scores (N, H, T) float32. `kv` (N, T', 2·H·72): attend to these keys and values in place of the packed ones. `config`: by
    default what `choose` gives. Not differentiable. Meet a shape once before capturing it in a graph.
    """
    n, queries, width = qkv.shape
    keys = qkv if kv is None else kv
    if any(not tensor.is_contiguous() or tensor.data_ptr() % 16 for tensor in (qkv, keys)):
        raise ValueError("attention: route 'hopper' takes contiguous tensors, aligned to 16 bytes")
    tokens = keys.shape[1]
    config = config or choose(
        n * num_heads, queries, torch.cuda.get_device_properties(qkv.device).multi_processor_count
    )
    out = torch.empty(n, queries, width // 3, dtype=qkv.dtype, device=qkv.device)
    lse = torch.empty(n, num_heads, queries, device=qkv.device)
    if out.numel() == 0:
        return out, lse
    function, most = _kernel(config, qkv.dtype, qkv.device)
    items = n * num_heads * -(-queries // (64 * config.warpgroups))
    maps = [
        packed_map(tensor.data_ptr(), qkv.dtype, n, tensor.shape[1], tensor.shape[2] // HEAD_DIM, columns, swizzle)
        for tensor in (qkv, keys)
        for columns, swizzle in ((64, hopper.SWIZZLE_128), (16, hopper.SWIZZLE_32))
    ]
    scale = 1 / (math.sqrt(HEAD_DIM) * math.log(2))  # of a score in powers of two
    numbers = (
        queries,
        tokens,
        num_heads,
        num_heads if kv is None else 0,
        items,
    )  # the fourth: at which of its parts the keys begin
    hopper.launch(
        function,
        min(items, most),
        config.threads,
        config.shared_bytes,
        qkv.device,
        (*maps, out, lse, *map(ctypes.c_int, numbers), ctypes.c_float(scale)),
    )
    return out, lse
