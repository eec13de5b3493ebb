"""Multi-head attention straight from the packed projection: nothing is transposed, padded or copied in memory.

    softmax(q·kᵀ/√d)·v per head        (Vaswani et al. 2017, arXiv:1706.03762, eq. 1)

Every backend but "torch" keeps softmax's statistics in float32 and never stores the (T, T) weights.

    hopper                      our kernel: half precision, head dim 72, capability 9.0; not differentiable
    triton                      our kernel for Ampere and Ada: half precision, head dim 72; not differentiable
    cudnn, flash, efficient     torch's kernels; torch refuses what they cannot do
    torch                       the reference, any dtype and device
    auto                        head dim 72 in half precision: hopper on Hopper, triton on Ampere and Ada
                                other head dims in half precision: cudnn on Hopper, flash on Ampere and Ada
                                efficient on older GPUs and for float32; flash on Blackwells and CPUs
"""

import torch
from torch import Tensor

from accel.kernels import check_backend, cuda
from accel.kernels.attention import hopper, reference, sdpa

GENERATIONS = {"hopper": "9.0", "triton": "8.0 to 8.9"}  # the capabilities that our kernels are for
BACKENDS = ("auto", *GENERATIONS, *sdpa.KERNELS, "torch")


def attention(qkv: Tensor, num_heads: int, backend: str = "auto") -> Tensor:
    """Self-attention: qkv (N, T, 3·D), q, k and v side by side, each head-major → (N, T, D), same dtype."""
    return _attend(qkv, None, num_heads, backend)


def attention_to(qkv: Tensor, kv: Tensor, num_heads: int, backend: str = "auto") -> Tensor:
    """The queries of qkv (N, t, 3·D) attend to other keys and values, kv (N, T, 2·D) side by side → (N, t, D)."""
    return _attend(qkv, kv, num_heads, backend)


def choose(device: torch.device, dtype: torch.dtype, dim: int) -> str:
    """The backend that "auto" takes."""
    capability = cuda.capability(device)
    if device.type != "cuda":
        return "flash"
    if dtype == torch.float64:
        return "torch"
    if dtype not in cuda.HALF or capability < (8, 0):
        return "efficient"
    ours = dim == hopper.HEAD_DIM  # which libraries pad to 96
    if capability == (9, 0):
        return "hopper" if ours else "cudnn" if dim <= 128 and dim % 8 == 0 else "flash"
    return "triton" if ours and capability[0] == 8 and cuda.HAS_TRITON else "flash"


def _attend(qkv, kv, num_heads, backend):
    backend = _resolve(qkv, num_heads, backend)
    if backend == "hopper":
        return hopper.attention(qkv, kv, num_heads)
    if backend == "triton":
        from accel.kernels.attention import triton

        return triton.attention(qkv, kv, num_heads)
    q, k, v = _heads(qkv, kv, num_heads)
    out = reference.attention(q, k, v) if backend == "torch" else sdpa.attention(q, k, v, backend)
    return out.transpose(1, 2).flatten(2)


def _resolve(qkv, num_heads, backend):
    """The backend's name, also for "auto"."""
    check_backend("attention", backend, BACKENDS)
    dim = qkv.shape[-1] // (3 * num_heads)
    if backend == "auto":
        return choose(qkv.device, qkv.dtype, dim)
    if backend in GENERATIONS and not _runs(backend, qkv, dim):
        takes = f"half precision and head dim {hopper.HEAD_DIM} on a GPU of capability {GENERATIONS[backend]}"
        given = f"{qkv.dtype} and head dim {dim} on {qkv.device}"
        raise ValueError(f"attention: backend {backend!r} takes {takes}, not {given}; take 'auto'")
    return backend


def _runs(backend, qkv, dim):
    """Whether one of our kernels takes this; on a CPU Triton's interpreter does."""
    capability = cuda.capability(qkv.device)
    on_its_gpu = capability == (9, 0) if backend == "hopper" else capability[0] == 8 or not qkv.is_cuda
    return on_its_gpu and dim == hopper.HEAD_DIM and qkv.dtype in cuda.HALF


def _heads(qkv, kv, num_heads):
    """Views of the queries (N, h, t, d) and of the keys and values, each (N, h, T, d)."""
    if kv is None:
        return qkv.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    q = qkv[..., : qkv.shape[-1] // 3].unflatten(-1, (num_heads, -1)).transpose(1, 2)
    return q, *kv.unflatten(-1, (2, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
