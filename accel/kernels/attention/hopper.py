"""Attention at head dim 72 on Hopper (hopper.cu).

q·kᵀ is padded from d = 72 to 80, p·v is not padded; libraries pad both to 96 or 128.
"""

import math
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from accel.kernels import cuda

FILE = Path(__file__).with_suffix(".cu")
HEAD_DIM = 72
SCORE_SCALE = 1 / (math.sqrt(HEAD_DIM) * math.log(2))  # softmax is computed with exp2
BOX_TOKENS = 32


class Config(NamedTuple):
    """Compile-time shape of a kernel; hopper.cuh documents the fields."""

    warpgroups: int
    keys: int
    stages: int
    blocks: int
    pipelined: bool = False
    q_buffers: int = 2
    parts: int = 1

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def shared_bytes(self) -> int:
        """Return the size of barriers, query tiles, and stages of keys and values."""
        queries = self.q_buffers * 64 * self.warpgroups
        keys = self.stages * self.keys
        return 1024 + self.parts * (queries * 160 + keys * (160 + 256))

    def items(self, heads: int, queries: int) -> int:
        """Return the number of query tiles of `heads` heads."""
        return heads * -(-queries // (64 * self.warpgroups))


# Measured on an H200 (log/attention-h200.json, log/products-few-rows-h200.json). Blocks of 256
# queries read keys and values half as often as blocks of 128, but with few queries they leave
# warpgroups or multiprocessors idle.
LONG = Config(warpgroups=4, keys=64, stages=4, blocks=1, pipelined=True)
SHORT = Config(warpgroups=2, keys=64, stages=2, blocks=2)
SINGLE = Config(warpgroups=1, keys=64, stages=3, blocks=2)
SHORT_TOKENS = 256


def choose_config(heads: int, queries: int, multiprocessors: int) -> Config:
    """Return the configuration for `heads` heads (of all samples) with `queries` queries each.

    It has the largest blocks that keep at least three quarters of the multiprocessors busy.
    """

    def enough(config):
        return config.items(heads, queries) >= 0.75 * multiprocessors

    if queries > SHORT_TOKENS and enough(LONG):
        return LONG
    return SHORT if enough(SHORT) else SINGLE


def source(config: Config, dtype: torch.dtype, file: Path = FILE) -> str:
    """Return the complete CUDA source for a configuration and dtype.

    file: defines the kernel's arithmetic.
    """
    half = cuda.HALF_TYPES[dtype]
    multiply_qk = cuda.wgmma("multiply_qk", config.keys, half)
    multiply_pv = cuda.wgmma("multiply_pv", HEAD_DIM, half, a_in_registers=True)
    return cuda.source(
        (FILE.with_suffix(".cuh"), file),
        config,
        multiply_qk + multiply_pv,
        half,
        HEAD=HEAD_DIM,
        **cuda.registers(config.warpgroups, config.blocks),
    )


@lru_cache(None)
def _kernel(config, dtype, device):
    return cuda.Kernel(
        source(config, dtype), "attention", config.threads, config.shared_bytes, device
    )


def head_maps(packed: Tensor) -> list:
    """Return tensor maps of (N, T, parts·H·72).

    One load copies 32 tokens of a head: columns 0 to 63 with the first map, the remaining columns
    and 8 columns of zeros with the second.
    """
    n, tokens, width = packed.shape
    heads = width // HEAD_DIM
    line = 2 * HEAD_DIM  # bytes of one head of a token
    sizes = (HEAD_DIM, heads, tokens, n)
    strides = (line, heads * line, tokens * heads * line)
    return [
        cuda.tensor_map(packed, sizes, strides, (64, 1, BOX_TOKENS, 1), swizzle=128),
        cuda.tensor_map(packed, sizes, strides, (16, 1, BOX_TOKENS, 1), swizzle=32),
    ]


def attention(
    qkv: Tensor, kv: Tensor | None, num_heads: int, config: Config | None = None
) -> Tensor:
    """Launch the kernel: qkv (N, T, 3·H·72) half, contiguous → (N, T, H·72).

    kv (N, T', 2·H·72): keys and values, or None for those in qkv. Softmax is computed in float32,
    its weights are rounded to half precision. Run each shape once before capturing it in a graph.
    """
    n, queries, width = qkv.shape
    keys = qkv if kv is None else kv
    multiprocessors = cuda.multiprocessors(qkv.device)
    config = config or choose_config(n * num_heads, queries, multiprocessors)
    out = torch.empty(n, queries, width // 3, dtype=qkv.dtype, device=qkv.device)
    items = config.items(n * num_heads, queries)
    query_maps = head_maps(qkv)
    key_maps = query_maps if kv is None else head_maps(kv)
    _kernel(config, qkv.dtype, qkv.device).launch(
        min(items, multiprocessors * config.blocks),
        *query_maps,
        *key_maps,
        out,
        queries,
        keys.shape[1],
        num_heads,
        num_heads if kv is None else 0,  # index of the first head of keys in `keys`
        items,
        SCORE_SCALE,
    )
    return out
