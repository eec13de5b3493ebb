"""An emulation, in float64, of the sums of tensor cores.

A core adds a block of multiplied pairs and its accumulator at once: aligned to the
largest of them, each is cut to 24 bits and some extra ones, and the sum is cut to
float32's 24 (Fasi et al. 2021, PeerJ CS 7:e330; Khattak & Mikaitis 2025,
arXiv:2512.07004). Nothing is rounded. The T4's row is an assumption: Volta's block with
Ampere's extra bit.
"""

from typing import NamedTuple

import torch

from accel.kernels.split_attention import cublas as split_attention
from accel.kernels.split_linear import cublas as split_linear


class Core(NamedTuple):
    """A generation's tensor core."""

    block: int  # number of products that are added at once
    extra_bits: int  # bits of an addend below float32's last bit


CORES = {
    (7, 0): Core(4, 0),
    (7, 5): Core(4, 1),
    (8, 0): Core(8, 1),
    (9, 0): Core(16, 2),
    (10, 0): Core(16, 2),
}


def cut(x, largest, bits):
    """Truncate x to `bits` bits below the leading bit of `largest`."""
    unit = torch.exp2((torch.frexp(largest).exponent - bits).double().clamp(min=-500))
    return torch.trunc(x / unit) * unit


def multiply(a, b, core):
    """a (…, M, K) · b (…, K, N), both float16 → (…, M, N) float32."""
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.float64)
    for start in range(0, a.shape[-1], core.block):
        block = slice(start, start + core.block)
        # (…, M, N, block)
        terms = a[..., None, block].double() * b[..., block, :].mT[..., None, :, :].double()
        addends = torch.cat([terms, total[..., None]], -1)
        total = cut(addends, addends.abs().amax(-1, keepdim=True), 24 + core.extra_bits).sum(-1)
        total = cut(total, total, 24)
    return total.float()


def run_cublas_here(monkeypatch, capability=None):
    """Make the cuBLAS backends run on a CPU under Triton's interpreter: in float32, or as on a GPU
    of `capability`, by emulated tensor cores.
    """

    def multiply_add(a, b, out, add):
        y = a.float() @ b.float() if capability is None else multiply(a, b, CORES[capability])
        out.copy_(out + y if add else y)

    if capability is not None:
        monkeypatch.setattr(split_linear.gpu, "capability", lambda device: capability)
    monkeypatch.setattr(split_linear, "multiply_add", multiply_add)
    monkeypatch.setattr(split_attention, "multiply_add", multiply_add)
