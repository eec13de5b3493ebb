"""torch's attention kernels, on views with strides. The heads of the result lie side by side in memory."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
    """q (N, h, t, d), k and v (N, h, T, d) → (N, h, t, d)."""
    with sdpa_kernel(KERNELS[backend]):
        return F.scaled_dot_product_attention(q, k, v)


def attention_lse(q: Tensor, k: Tensor, v: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """As `attention`, with the log-sum-exp of the scores (N, h, t)."""
    if backend == "flash":
        name, more = f"flash_attention{'' if q.is_cuda else '_for_cpu'}", ()
    else:
        name, more = f"{backend}_attention", (None, True)  # no bias, with log-sum-exp
    out, lse = getattr(torch.ops.aten, f"_scaled_dot_product_{name}")(q, k, v, *more)[:2]
    # Some pad the tokens, some keep a last dimension of 1.
    return out, lse.reshape(*q.shape[:2], -1)[..., : q.shape[2]]
