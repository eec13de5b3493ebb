"""Multi-head attention of the packed projection.

    softmax(q·kᵀ/√d)·v per head        (Vaswani et al. 2017, arXiv:1706.03762, eq. 1)

Nothing is transposed, padded or copied in memory. All backends except "torch" keep the statistics
of softmax in float32 and never store the (T, T) weights. The kernels are not differentiable.

    hopper                      hopper.cu: half precision, head dim 72, capability 9.0
    simt                        simt.cu: float32, head dims up to 72 that are multiples of 8
    cudnn, flash, efficient     torch's kernels; torch raises an error for unsupported inputs
    torch                       the reference, any dtype and device
    auto                        depends on device, dtype and head dim:

    | device              | half, head dim 72 | half, other head dims | float32   |
    |---------------------|-------------------|-----------------------|-----------|
    | Hopper              | hopper            | cudnn, else flash     | simt      |
    | Ampere, Ada         | flash             | flash                 | efficient |
    | older GPUs          | efficient         | efficient             | efficient |
    | Blackwell           | flash             | flash                 | efficient |
    | CPU                 | flash             | flash                 | flash     |

simt is chosen for its head dims if every multiprocessor has a block; else efficient.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.kernels import cuda, gpu
from accel.kernels.attention import hopper, simt


def attention(qkv: Tensor, num_heads: int, backend: str = "auto") -> Tensor:
    """Compute self-attention: qkv (N, T, 3·D) → (N, T, D), same dtype.

    q, k and v are concatenated, each head-major.
    """
    return attention_to(qkv, None, num_heads, backend)


def attention_to(qkv: Tensor, kv: Tensor | None, num_heads: int, backend: str = "auto") -> Tensor:
    """Compute attention of the queries in qkv (N, t, 3·D) to the keys and values kv → (N, t, D).

    kv (N, T, 2·D): keys and values, concatenated; None: those in qkv. The backend must support the
    inputs.
    """
    dim = qkv.shape[-1] // (3 * num_heads)
    if backend == "auto":
        blocks = simt.blocks(len(qkv), qkv.shape[1], num_heads)
        backend = choose_backend(qkv.device, qkv.dtype, dim, blocks)
    if backend == "hopper":
        fits = dim == hopper.HEAD_DIM and qkv.dtype in cuda.HALF_TYPES
        on_hopper = gpu.capability(qkv.device)[0] == 9
        assert fits and on_hopper, "backend 'hopper' needs half precision, head dim 72 and Hopper"
        return hopper.attention(qkv, kv, num_heads)
    if backend == "simt":
        return simt.attention(qkv, kv, num_heads)
    q, k, v = _heads(qkv, kv, num_heads)
    if backend == "torch":
        out = reference(q, k, v)
    elif qkv.device.type == "cuda":
        out = _by_torch(q, k, v, backend)
    else:
        assert backend == "flash", f"{backend!r} needs a GPU"
        out = F.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2).flatten(2)


def choose_backend(device: torch.device, dtype: torch.dtype, dim: int, blocks: int = 0) -> str:
    """Return the backend that "auto" selects. blocks: the number of blocks of simt."""
    capability = gpu.capability(device)
    if device.type != "cuda":
        return "flash"
    if dtype == torch.float64:
        return "torch"
    if dtype == torch.float32 and capability == (9, 0):
        return "simt" if simt.supports(dim) and blocks > simt.MULTIPROCESSORS else "efficient"
    if dtype not in cuda.HALF_TYPES or capability < (8, 0):
        return "efficient"
    if capability == (9, 0) and dim == hopper.HEAD_DIM:  # libraries pad it to 96
        return "hopper"
    if capability == (9, 0) and dim <= 128 and dim % 8 == 0:
        return "cudnn"
    return "flash"


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the formula in float32 or wider.

    q (N, h, t, d), k and v (N, h, T, d) → (N, h, t, d) in q's dtype.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).mT / math.sqrt(q.shape[-1])  # (N, h, t, T)
    return (scores.softmax(-1) @ v.to(wide)).to(q.dtype)


def _by_torch(q, k, v, backend):
    """Compute attention with the named kernel of torch, on strided views.

    torch's context manager sdpa_kernel is not used, because it is process-wide: two threads whose
    with-blocks overlap could disable the other kernels permanently.
    """
    aten = torch.ops.aten
    if backend == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, False)[0]
    if backend == "efficient":
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, False)[0]
    dim = q.shape[-1]
    if dim % 8:  # flash needs a multiple of eight
        q, k, v = (F.pad(x, (0, -dim % 8)) for x in (q, k, v))
    out = aten._scaled_dot_product_flash_attention(q, k, v, scale=1 / math.sqrt(dim))[0]
    return out[..., :dim]


def _heads(qkv, kv, num_heads):
    """Return views of the queries (N, h, t, d), keys and values, each (N, h, T, d)."""
    width = qkv.shape[-1] // 3
    q = qkv[..., :width].unflatten(-1, (num_heads, -1)).transpose(1, 2)
    kv = qkv[..., width:] if kv is None else kv
    k, v = kv.unflatten(-1, (2, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v
