"""Self-attention of high/low splits, with float32 accuracy on float16 tensor cores.

softmax(q·kᵀ/√d)·v: three GEMMs compute the scores (see accel.kernels.split_linear), softmax is
float32, and its weights are split too. A tensor core truncates when it accumulates, so the p·v of
each tile is summed separately and then added to the output in float32. Weights are scaled by a
power of two, so that the low parts of small weights are not lost; the sums have the same factor.

    hopper      hopper.cu: capability 9.0, head dim 72
    cublas      other GPUs with float16 tensor cores: two batched GEMMs with Triton kernels between
                them; stores the weights of some heads at a time
    torch       the reference, in float64, on any device
    auto        the first of these that the device supports
"""

import torch

from accel.kernels import gpu
from accel.kernels.split_attention import cublas, hopper, reference
from accel.kernels.split_linear import HighLow


def choose_backend(device: torch.device, dim: int) -> str:
    """Return the backend that "auto" selects."""
    if device.type != "cuda":
        return "torch"
    if gpu.capability(device) == (9, 0) and dim == hopper.HEAD_DIM:
        return "hopper"
    return "cublas"


def split_attention(qkv: HighLow, num_heads: int, backend: str = "auto") -> HighLow:
    """Compute attention of qkv (N, T, 3·D) → (N, T, D), both without scales.

    q, k and v are concatenated, each head-major (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).
    """
    dim = qkv.pair.shape[-1] // (3 * num_heads)
    if backend == "auto":
        backend = choose_backend(qkv.pair.device, dim)
    module = {"hopper": hopper, "cublas": cublas, "torch": reference}[backend]
    return HighLow(module.attention(qkv.pair, num_heads), None)
