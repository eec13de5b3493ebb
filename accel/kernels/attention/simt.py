"""Launch of simt.cu: attention in float32 without tensor cores.

torch's mem-efficient kernel computes each float32 product as three TF32 products from Ampere on. A
block needs 76 KiB of shared memory, which Turing lacks.
"""

import math
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from accel.kernels import cuda

FILE = Path(__file__).with_name("simt.cu")
THREADS = 128
ROWS = 128  # queries of a block
KEYS = 64  # in shared memory at a time
MAX_HEAD_DIM = 72  # a thread has no registers for more
MULTIPROCESSORS = 132  # of an H100 or H200; with fewer blocks than these the kernel gains nothing


def supports(dim: int) -> bool:
    """Return whether the kernel supports a head dim."""
    return dim % 8 == 0 and dim <= MAX_HEAD_DIM


def blocks(n: int, queries: int, num_heads: int) -> int:
    """Return the number of blocks for n batch rows."""
    return n * num_heads * -(-queries // ROWS)


def source(dim: int) -> str:
    """Return the complete CUDA source for a head dim."""
    constants = dict(HEAD=dim, THREADS=THREADS, ROWS=ROWS, KEYS=KEYS)
    defines = [f"#define {name} {value}\n" for name, value in constants.items()]
    return "".join([*defines, FILE.read_text()])


@lru_cache(None)
def _kernel(dim: int, device: torch.device) -> cuda.Kernel:
    shared_bytes = 4 * (ROWS + 2 * KEYS) * (dim + 4)
    return cuda.Kernel(source(dim), "attention", THREADS, shared_bytes, device)


def attention(qkv: Tensor, kv: Tensor | None, num_heads: int) -> Tensor:
    """Compute attention of qkv (N, t, 3·D) to itself or to kv (N, T, 2·D) → (N, t, D).

    All are contiguous, in float32.
    """
    n, queries, packed = qkv.shape
    width = packed // 3
    dim = width // num_heads
    kv = qkv[..., width:] if kv is None else kv
    k, v = kv.split(width, -1)
    out = qkv.new_empty(n, queries, width)
    _kernel(dim, qkv.device).launch(
        blocks(n, queries, num_heads),
        qkv,
        k,
        v,
        out,
        queries,
        kv.shape[1],
        num_heads,
        packed,
        kv.stride(1),
        1 / (math.sqrt(dim) * math.log(2)),  # the kernel uses powers of 2
    )
    return out
