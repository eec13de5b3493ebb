"""Self-attention at float32 accuracy on float16 tensor cores, from and to high/low splits.

softmax(q·kᵀ/√d)·v: scores by three GEMMs (accel.kernels.split_linear), float32 softmax. Weights are
split too. A tensor core truncates when it accumulates, so each tile's p·v is summed by itself and
then added to the output in float32. Weights run up to 2⁶, not 1, so that the low parts of small
ones are not lost; the sums carry the same factor.

    hopper      our kernel: capability 9.0, head dim 72
    cublas      any other GPU with float16 tensor cores: two batched GEMMs, Triton kernels between;
                stores some heads' weights
    torch       the reference, in float64, any device
    auto        the first of these that runs there
"""

import torch

from accel.kernels import check_backend, cuda
from accel.kernels.split_attention import cublas, hopper, reference
from accel.kernels.split_linear import HighLow

BACKENDS = ("auto", "hopper", "cublas", "torch")


def choose_backend(device: torch.device, dim: int) -> str:
    """Return the backend that "auto" takes."""
    if device.type != "cuda":
        return "torch"
    if cuda.capability(device) == (9, 0) and dim == hopper.HEAD_DIM:
        return "hopper"
    return "cublas"


def split_attention(qkv: HighLow, num_heads: int, backend: str = "auto") -> HighLow:
    """Compute attention of qkv (N, T, 3·D) → (N, T, D), both without scales.

    q, k and v lie side by side, each head-major (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).
    """
    check_backend("split_attention", backend, BACKENDS)
    dim = qkv.pair.shape[-1] // (3 * num_heads)
    if backend == "auto":
        backend = choose_backend(qkv.pair.device, dim)
    module = {"hopper": hopper, "cublas": cublas, "torch": reference}[backend]
    return HighLow(module.attention(qkv.pair, num_heads), None)
