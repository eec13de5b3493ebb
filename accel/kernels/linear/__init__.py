"""f(x·Wᵀ + b), with f in the GEMM's epilogue where a backend has it.

    ""          the GEMM alone
    gelu        its tanh form (Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2),
                x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2
    silu        x / (1 + e^-x)
    swiglu      silu(y₁)·y₂, W's two matrices one below the other
    rotate      queries and keys of the packed projection rotated, as qk_norm_rotary.py does
    modulate    t·r·(1 + y₁) + y₂ of the residual stream t, r = 1/√(mean(t²) + ε); W as for swiglu
    residual    t ← t + gate·y, in place; gives the sums of t² that modulate takes

Backends:

    hopper      our kernel, capability 9.0: all but gelu and the GEMM alone (hopper.py); rotate for
                rows of 256 tokens or a part of them, else as tuned
    tuned       the fastest of cuBLASLt's algorithms (tuner.py, cublaslt.py); GELU in its epilogue
    epilogue    torch's GEMM; GELU in its epilogue, on a GPU
    torch       the reference: torch's GEMM, then f as kernels of its own (reference.py)
    auto        for half precision on a GPU the first of these that has f, else torch
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.kernels import check_backend, cuda
from accel.kernels.linear.reference import EPILOGUES, TWO_MATRICES, EpilogueArgs
from accel.kernels.linear.tuner import Tuner

BACKENDS = ("auto", "hopper", "tuned", "epilogue", "torch")
PERIOD = 256  # tokens, after which our kernel's blocks rotate by the same angles again


class Linear:
    """A layer x (…, K) → (…, N) in its weights' dtype, accumulated in float32 for half inputs.

    weight (N, K), bias (N,) or None, contiguous, on one device. epilogue: f, or "". rotation
    (T, d/2, 2) float32, for "rotate": cosines and sines of every position. tuner: chooses
    algorithms, one for all layers of a network; None makes one.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        epilogue: str = "",
        rotation: Tensor | None = None,
        tuner: Tuner | None = None,
        backend: str = "auto",
    ):
        check_backend("linear", backend, BACKENDS)
        assert epilogue in ("", *EPILOGUES) and (rotation is None) == (epilogue != "rotate")
        self.weight = weight
        self.epilogue = epilogue
        self.rotation = rotation
        self.tuner = tuner or Tuner()
        # The epilogue adds a bias in any case.
        self.bias = weight.new_zeros(len(weight)) if bias is None else bias
        self.width = len(weight) // (2 if epilogue in TWO_MATRICES else 1)
        self.backend = self._choose() if backend == "auto" else backend
        # On a CPU torch's fused GELU is the exact one, another function.
        assert self.backend == "torch" or weight.is_cuda

    def _choose(self):
        if not self.weight.is_cuda or self.weight.dtype not in cuda.HALF_TYPES:
            return "torch"
        from accel.kernels.linear import hopper  # a CPU needs none

        fused = self.epilogue in hopper.FUSED_EPILOGUES
        if fused and hopper.supports(self.weight, self.epilogue, self.rotation):
            return "hopper"
        return "tuned"

    @property
    def rotates(self) -> bool:
        """Return whether a call takes the position of the first token."""
        return self.epilogue == "rotate"

    def shape(self, m: int) -> tuple[int, int, int, bool]:
        """Return (M, N, K, gelu) of the GEMM on M tokens, for the backend "tuned"."""
        return (m, *self.weight.shape, self.epilogue == "gelu")

    def prepare(self, m: int) -> None:
        """Compile and load the kernels for M tokens. cuBLASLt has its kernels compiled."""
        if self.backend == "hopper":
            from accel.kernels.linear import hopper

            hopper.load(self._tile(m), self)
        elif self.epilogue == "swiglu":
            EPILOGUES[self.epilogue](self.weight.new_zeros(1, len(self.weight)), EpilogueArgs())

    def parameters(self) -> Iterator[Tensor]:
        """Return the layer's tensors."""
        return iter((self.weight, self.bias))

    def zeros(self, *shape: int) -> Tensor:
        """Return a result of zeros (…, N), of two matrices (…, N/2)."""
        return self.weight.new_zeros(*shape, self.width)

    def __call__(self, x: Tensor, **epilogue_args: Any) -> Any:
        """Apply the layer: x (…, K), contiguous → (…, N), of two matrices (…, N/2).

        epilogue_args: fields of EpilogueArgs. For "rotate" x is (N, t, K) and `first` the position
        of the first of the t tokens. For "modulate": stream (…, N/2), its sums of squares, and eps.
        For "residual": stream and gate (…, N); the result is the new stream's sums of squares
        (parts, M).
        """
        args = EpilogueArgs(self.rotation, x.shape[-2], **epilogue_args)
        if self.backend == "hopper" and not (self.rotates and PERIOD % args.tokens):
            return self._by_hopper(x, args)
        y = self._multiply(x)
        in_epilogue = self.epilogue == "gelu" and self.backend != "torch"
        return y if in_epilogue or not self.epilogue else EPILOGUES[self.epilogue](y, args)

    def _tile(self, m):
        from accel.kernels.linear import hopper

        multiprocessors = cuda.multiprocessors(self.weight.device)
        depth = self.weight.shape[1]
        return hopper.choose_tile(m, self.width, depth, self.epilogue, multiprocessors)

    def _by_hopper(self, x, args):
        """Return the result by our kernel."""
        from accel.kernels.linear import hopper

        m = x.numel() // x.shape[-1]
        shape = (*x.shape[:-1], self.width)
        tile = self._tile(m)
        out = None
        if self.epilogue == "residual":
            parts = tile.column_tiles(self.width, self.epilogue)
            squares = torch.empty(parts, m, device=x.device)
            args = args._replace(squares=squares)
        else:
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
        hopper.launch(tile, self.epilogue, x, self.weight, self.bias, out, args)
        return args.squares if out is None else out

    def _multiply(self, x):
        """Return x·Wᵀ + b, after GELU where the backend's epilogue has it."""
        if self.backend == "epilogue" and self.epilogue == "gelu":
            y = torch._addmm_activation(self.bias, x.flatten(0, -2), self.weight.t(), use_gelu=True)
            return y.unflatten(0, x.shape[:-1])
        if self.backend not in ("tuned", "hopper"):
            return F.linear(x, self.weight, self.bias)
        for tensor in (x, self.weight, self.bias):
            assert tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
        m = x.numel() // x.shape[-1]
        choice = self.tuner.choose(*self.shape(m), x.dtype, x.device)
        out = torch.empty(*x.shape[:-1], len(self.bias), dtype=x.dtype, device=x.device)
        with torch.cuda.device(x.device):
            choice.run(x, self.weight, self.bias, out)
        return out
