"""torch's attention kernels, on views with strides. The heads of the result lie side by side in memory."""

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
