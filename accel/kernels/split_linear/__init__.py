"""A float32 linear layer on float16 tensor cores.

Operands are split into high and low, and three GEMMs are summed in float32:

    x = (high + low) · 2^e,    x·w ≈ low·high + high·low + high·high

low·low is left out: it lies below float32's last bit (Markidis et al. 2018, arXiv:1803.04014). A
tensor core truncates when it adds to its accumulator, so sums over a long inner dimension drift.
As in Ootomo & Yokota 2022 (arXiv:2203.03341), parts of the sum are therefore added outside, where
float32 rounds to nearest. The small GEMMs come first in each part.

    hopper      our kernel: capability 9.0, N and K in eights
    cublas      any other GPU with float16 tensor cores: a GEMM over all three parts, then a Triton
                kernel
    torch       the reference, in float64, any device
    auto        the first of these that runs on the device
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from accel.kernels import check_backend, cuda
from accel.kernels.split_linear import cublas, hopper, reference
from accel.kernels.split_linear.high_low import HighLow, balance, new_pair, split

__all__ = ["HighLow", "SplitLinear", "balance", "choose_backend", "split", "split_rows"]

BACKENDS = ("auto", "hopper", "cublas", "torch")


def choose_backend(device: torch.device) -> str:
    """Return the backend that "auto" takes."""
    if device.type != "cuda":
        return "torch"
    return "hopper" if cuda.capability(device) == (9, 0) else "cublas"


def split_rows(x: Tensor, stack: bool = False, backend: str = "auto") -> HighLow:
    """Return `split(x)` of a float32 x (…, K), in one pass on a GPU.

    stack: in the layout that cuBLAS's split GEMM takes.
    """
    if not cuda.uses_triton("split_rows", backend, x):
        return split(x)
    from accel.kernels.split_linear import triton

    pair = new_pair(*x.shape, device=x.device, stack=stack)
    scales = torch.empty(x.shape[:-1], device=x.device)
    if triton.by_columns(x):
        triton.split_columns(x, pair, scales, stack)
    else:
        triton.split_rows(x.contiguous(), pair, scales, stack)
    return HighLow(pair, scales)


class SplitLinear:
    """A layer x (…, K) → (…, N) at float32 accuracy.

    weight (N, K), bias (N,) float32, on the device to run on. overflow: an int32 tensor of one
    element. With it the result is HighLow without scales, and it is set to 1 where a value is too
    large for float16; without it the result is float32. gelu_scale (N,), with overflow: tanh-GELU
    follows, then a multiplication by these powers of two; the next layer has their inverse in its
    weights (`balance`). scaled: whether inputs have scales, for `prepare`. low: whether low
    parts count; without them the GEMM is one in half precision, by "hopper" or "torch". name: of
    the layer, for errors. Raises ValueError, naming the layer, for weights that are not finite.
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
        check_backend("split_linear", backend, BACKENDS)
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
        """Compile and load the kernels for M tokens, by a launch on zeros."""
        pair = torch.zeros(2, m, self.depth, dtype=torch.float16, device=self.pair.device)
        scale = torch.ones(m, dtype=torch.float32, device=self.pair.device)
        self(HighLow(pair, scale if self.scaled else None))

    def parameters(self) -> Iterator[Tensor]:
        """Return the layer's tensors."""
        tensors = (self.pair, self.scale, self.bias, self.gelu_scale)
        return (tensor for tensor in tensors if tensor is not None)

    def zeros(self, *shape: int) -> Tensor | HighLow:
        """Return a result (…, N) of zeros."""
        if self.high_low:
            return HighLow(self.pair.new_zeros(2, *shape, self.columns), None)
        return self.bias.new_zeros(*shape, self.columns)

    def __call__(self, x: HighLow, position: Tensor | None = None) -> Tensor | HighLow:
        """Apply the layer: x (…, K) → (…, N), float32 or HighLow.

        position (t, N) float32, contiguous, takes the bias's place for x (…, t, K): row i of it is
        for token i. The result is then float32.
        """
        if position is None:
            return self.kernels.linear(self, x)
        assert not self.high_low
        if self.kernels is hopper:
            return hopper.linear(self, x, position)
        return self.kernels.linear(self, x) + (position - self.bias)
