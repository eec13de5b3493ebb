"""y = x·Wᵀ + b, with GELU in the GEMM's epilogue, by the fastest algorithm on this GPU.

GELU is the tanh form (Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2),

    x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2

    tuned       the fastest of cuBLASLt's algorithms (tuner.py, cublaslt.py)
    epilogue    torch's fused call, on a GPU
    torch       the reference: GEMM, then GELU as a kernel of its own
    auto        tuned for half precision on a GPU, else torch
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.kernels import check_backend, cuda
from accel.kernels.linear.tuner import Tuner

BACKENDS = ("auto", "tuned", "epilogue", "torch")


class Linear:
    """A layer x (…, K) → (…, N) in its weights' dtype, accumulated in float32 for half inputs.

    weight (N, K), bias (N,) or None, contiguous, on one device. gelu: GELU follows. tuner: chooses
    algorithms, one for all layers of a network; None makes one.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        gelu: bool = False,
        tuner: Tuner | None = None,
        backend: str = "auto",
    ):
        check_backend("linear", backend, BACKENDS)
        self.weight = weight
        self.gelu = gelu
        self.tuner = tuner or Tuner()
        # The epilogue adds a bias in any case.
        self.bias = weight.new_zeros(len(weight)) if bias is None else bias
        self.backend = backend
        if backend == "auto":
            half_on_gpu = weight.is_cuda and weight.dtype in cuda.HALF
            self.backend = "tuned" if half_on_gpu else "torch"
        # On a CPU torch's fused GELU is the exact one, another function.
        assert self.backend == "torch" or weight.is_cuda

    def shape(self, m: int) -> tuple[int, int, int, bool]:
        """Return (M, N, K, gelu) of the GEMM on M tokens."""
        return (m, *self.weight.shape, self.gelu)

    def prepare(self, m: int) -> None:
        """No-op: cuBLASLt has its kernels compiled."""

    def parameters(self) -> Iterator[Tensor]:
        """Return the layer's tensors."""
        return iter((self.weight, self.bias))

    def zeros(self, *shape: int) -> Tensor:
        """Return a result (…, N) of zeros."""
        return self.weight.new_zeros(*shape, len(self.weight))

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer: x (…, K), contiguous → (…, N)."""
        if self.backend == "epilogue" and self.gelu:
            y = torch._addmm_activation(self.bias, x.flatten(0, -2), self.weight.t(), use_gelu=True)
            return y.unflatten(0, x.shape[:-1])
        if self.backend != "tuned":
            y = F.linear(x, self.weight, self.bias)
            return F.gelu(y, approximate="tanh") if self.gelu else y
        for tensor in (x, self.weight, self.bias):
            assert tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
        m = x.numel() // x.shape[-1]
        choice = self.tuner.choose(*self.shape(m), x.dtype, x.device)
        out = torch.empty(*x.shape[:-1], len(self.bias), dtype=x.dtype, device=x.device)
        with torch.cuda.device(x.device):
            choice.run(x, self.weight, self.bias, out)
        return out
