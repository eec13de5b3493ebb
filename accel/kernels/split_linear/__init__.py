"""A linear layer with float32 accuracy on float16 tensor cores.

Operands are split into high and low, and three GEMMs are summed in float32:

    x = (high + low) · 2^e,    x·w ≈ low·high + high·low + high·high

low·low is omitted, because it is below float32's last bit (Markidis et al. 2018, arXiv:1803.04014).
A tensor core truncates when it adds to its accumulator, so sums over a long inner dimension drift.
Partial sums are therefore added outside the tensor cores, where float32 rounds to nearest (Ootomo &
Yokota 2022, arXiv:2203.03341). The small GEMMs come first in each partial sum.

    hopper      hopper.cu: capability 9.0, N and K multiples of 8
    cublas      other GPUs with float16 tensor cores: one GEMM over all three parts, then a Triton
                kernel
    torch       the reference, in float64, on any device
    auto        the first of these that the device supports
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from accel.kernels import cuda, gpu
from accel.kernels.split_linear import cublas, hopper, reference
from accel.kernels.split_linear.high_low import HighLow, balance, new_pair, split

__all__ = ["HighLow", "SplitLinear", "balance", "choose_backend", "split", "split_rows"]


def choose_backend(device: torch.device) -> str:
    """Return the backend that "auto" selects."""
    if device.type != "cuda":
        return "torch"
    return "hopper" if gpu.capability(device) == (9, 0) else "cublas"


def split_rows(x: Tensor, stack: bool = False, backend: str = "auto") -> HighLow:
    """Return `split(x)` of a float32 x (…, K), in one pass on a GPU.

    stack: use the layout of cuBLAS's split GEMM.
    """
    if not cuda.uses_triton(backend, x):
        return split(x)
    from accel.kernels.split_linear import triton

    pair = new_pair(*x.shape, device=x.device, stack=stack)
    scales = torch.empty(x.shape[:-1], device=x.device)
    is_column_major = x.ndim == 3 and x.mT.is_contiguous() and not x.is_contiguous()
    if is_column_major and x.shape[2] <= 1024:
        triton.split_columns(x, pair, scales, stack)
    else:
        triton.split_rows(x.contiguous(), pair, scales, stack)
    return HighLow(pair, scales)


class SplitLinear:
    """A layer x (…, K) → (…, N) with float32 accuracy.

    weight (N, K), bias (N,): float32, on the device that computes. overflow: None for a float32
    result; an int32 tensor of one element for a HighLow result without scales, set to 1 if a value
    is too large for float16. gelu_scale (N,), with overflow: apply tanh-GELU, then multiply by
    these powers of two; the caller divides the next layer's weights by them (see `balance`).
    scaled: whether inputs have scales, for `prepare`. low: whether to use low parts; without them
    it is a half-precision GEMM, with backend "hopper" or "torch". name: names the layer in
    errors. Raises ValueError if weights are not finite.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        *,
        overflow: Tensor | None = None,
        gelu_scale: Tensor | None = None,
        scaled: bool = True,
        low: bool = True,
        name: str = "",
        backend: str = "auto",
    ):
        assert gelu_scale is None or overflow is not None
        self.backend = choose_backend(weight.device) if backend == "auto" else backend
        assert low or self.backend != "cublas"
        if not bool(weight.isfinite().all() & bias.isfinite().all()):
            raise ValueError(f"{name}: has weights that are not finite")
        self.columns, self.depth = weight.shape
        self.bias = bias.contiguous()
        self.gelu_scale = gelu_scale
        self.overflow = overflow
        self.gelu = gelu_scale is not None
        self.high_low = overflow is not None
        self.scaled = scaled
        self.low = low
        self.kernels = {"hopper": hopper, "cublas": cublas, "torch": reference}[self.backend]
        self.pair = self.kernels.arrange(weight)
        if not low:
            self.pair = self.pair[:1].clone()
        self.scale = split(weight).scale  # (N,)

    def prepare(self, m: int) -> None:
        """Compile and load the kernels for M tokens, with a launch on zeros."""
        pair = torch.zeros(2, m, self.depth, dtype=torch.float16, device=self.pair.device)
        scale = torch.ones(m, dtype=torch.float32, device=self.pair.device)
        self(HighLow(pair, scale if self.scaled else None))

    def parameters(self) -> Iterator[Tensor]:
        """Return the layer's tensors."""
        tensors = (self.pair, self.scale, self.bias, self.gelu_scale)
        return (tensor for tensor in tensors if tensor is not None)

    def zeros(self, *shape: int) -> Tensor | HighLow:
        """Return zeros in the shape of a result (…, N)."""
        if self.high_low:
            return HighLow(self.pair.new_zeros(2, *shape, self.columns), None)
        return self.bias.new_zeros(*shape, self.columns)

    def __call__(self, x: HighLow, position: Tensor | None = None) -> Tensor | HighLow:
        """Apply the layer: x (…, K) → (…, N), float32 or HighLow.

        position (t, N) float32, contiguous, replaces the bias for x (…, t, K): row i is added to
        token i. The result is then float32.
        """
        if position is None:
            return self.kernels.linear(self, x)
        assert not self.high_low
        if self.kernels is hopper:
            return hopper.linear(self, x, position)
        return self.kernels.linear(self, x) + (position - self.bias)
