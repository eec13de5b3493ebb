"""The linear layer in plain torch, and by torch's call with a fused GELU."""

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor, gelu: bool) -> Tensor:
    """x (…, K), weight (N, K), bias (N,) → (…, N)."""
    y = F.linear(x, weight, bias)
    return F.gelu(y, approximate="tanh") if gelu else y


def fused(x: Tensor, weight: Tensor, bias: Tensor, gelu: bool) -> Tensor:
    """As `linear`; on a GPU, with GELU in the GEMM's epilogue."""
    if not gelu:
        return F.linear(x, weight, bias)
    return torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True).unflatten(0, x.shape[:-1])
