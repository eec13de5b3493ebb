"""Split attention at head dim 72 on Hopper (hopper.cu)."""

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from accel.kernels import cuda
from accel.kernels.attention import hopper
from accel.kernels.attention.hopper import HEAD_DIM, SCORE_SCALE, head_maps

FILES = Path(hopper.__file__).with_suffix(".cuh"), Path(__file__).with_suffix(".cu")


class Config(NamedTuple):
    """Compile-time shape of the kernel; hopper.cu says what each means."""

    warpgroups: int
    keys: int
    stages: int
    q_buffers: int

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def shared_bytes(self) -> int:
        return 1024 + self.q_buffers * 2 * 64 * self.warpgroups * 160 + self.stages * 2 * self.keys * (160 + 256)


CONFIG = Config(warpgroups=2, keys=64, stages=3, q_buffers=1)  # measured: log/split-kernels-h200.json


def source(config: Config) -> str:
    """The whole CUDA text."""
    functions = (
        cuda.wgmma("multiply_qk", config.keys, "f16"),
        cuda.wgmma("multiply_pv", HEAD_DIM, "f16", a_in_registers=True, b_mn_major=True),
        cuda.conversions("f16"),
    )
    return cuda.source(FILES, config, functions, HEAD=HEAD_DIM, PARTS=2, **cuda.registers(config.warpgroups))


@lru_cache(None)
def _kernel(device):
    return cuda.Kernel(source(CONFIG), "split_attention", CONFIG.threads, CONFIG.shared_bytes, device)


def attention(pair: Tensor, num_heads: int) -> Tensor:
    """pair (2, N, T, 3·H·72) float16, contiguous → (2, N, T, H·72). A shape must be run once before it is captured."""
    _, n, tokens, width = pair.shape
    assert width == 3 * num_heads * HEAD_DIM, "backend 'hopper' takes head dim 72; take 'cublas'"
    out = torch.empty(2, n, tokens, width // 3, dtype=torch.float16, device=pair.device)
    items = n * num_heads * -(-tokens // (64 * CONFIG.warpgroups))
    if items:
        blocks, maps = min(items, cuda.multiprocessors(pair.device)), head_maps(pair.flatten(0, 1))
        _kernel(pair.device).launch(blocks, *maps, out, n, tokens, num_heads, items, SCORE_SCALE)
    return out
