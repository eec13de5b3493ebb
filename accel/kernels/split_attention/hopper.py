"""Split attention at head dim 72 on Hopper (hopper.cu)."""

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from accel.kernels import cuda
from accel.kernels.attention import hopper
from accel.kernels.attention.hopper import HEAD_DIM, SCORE_SCALE, Config, head_maps

# Measured in log/split-kernels-h200.json.
CONFIG = Config(warpgroups=2, keys=64, stages=3, blocks=1, pipelined=True, q_buffers=1, parts=2)


def source() -> str:
    """Return the complete CUDA source."""
    return hopper.source(CONFIG, torch.float16, Path(__file__).with_suffix(".cu"))


@lru_cache(None)
def _kernel(device):
    return cuda.Kernel(source(), "split_attention", CONFIG.threads, CONFIG.shared_bytes, device)


def attention(pair: Tensor, num_heads: int) -> Tensor:
    """Launch the kernel: pair (2, N, T, 3·H·72) float16, contiguous → (2, N, T, H·72).

    Run each shape once before capturing it in a graph.
    """
    _, n, tokens, width = pair.shape
    assert width == 3 * num_heads * HEAD_DIM, "backend 'hopper' needs head dim 72; use 'cublas'"
    out = torch.empty(2, n, tokens, width // 3, dtype=torch.float16, device=pair.device)
    items = CONFIG.items(n * num_heads, tokens)
    _kernel(pair.device).launch(
        min(items, cuda.multiprocessors(pair.device)),
        *head_maps(pair.flatten(0, 1)),
        out,
        n,
        tokens,
        num_heads,
        items,
        SCORE_SCALE,
    )
    return out
