"""f(x·Wᵀ + b), with f in the epilogue of the GEMM where the backend supports it.

    ""          no epilogue
    gelu        in its tanh form (Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2),
                x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2
    silu        x / (1 + e^-x)
    swiglu      silu(y₁)·y₂; W consists of two matrices, stacked
    rotate      rotate queries and keys of the packed projection (see qk_norm_rotary.py)
    modulate    t·r·(1 + y₁) + y₂ of the residual stream t, r = 1/√(mean(t²) + ε); W as for swiglu
    residual    t ← t + gate·y, in place; returns the sums of t², which modulate needs

Backends:

    hopper      hopper.cu, for capability 9.0: all epilogues except "" and gelu; rotate needs a
                number of tokens per row that divides 256, and else runs as in "tuned"
    tuned       the fastest of cuBLASLt's algorithms (tuner.py, cublaslt.py); GELU in its epilogue
                for half precision: in float32 the epilogue is slower than torch's GELU, and has
                four times its error
    epilogue    torch's GEMM on a GPU, with GELU in its epilogue
    torch       the reference: torch's GEMM, then f in separate kernels (reference.py)
    auto        hopper or tuned on a GPU, else torch
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.kernels import cuda
from accel.kernels.linear import hopper
from accel.kernels.linear.reference import EPILOGUES, TWO_MATRICES, EpilogueArgs
from accel.kernels.linear.tuner import Tuner

ROTATION_PERIOD = 256  # tokens; hopper.cu keeps the angles of so many positions per block


class Linear:
    """A layer x (…, K) → (…, N) in its weights' dtype, accumulated in float32 for half inputs.

    weight (N, K), bias (N,) or None: contiguous, on one device. epilogue: the name of f. rotation
    (T, d/2, 2) float32, for "rotate": cosine and sine for every position. tuner: chooses
    algorithms; the layers of a network share one.
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
        assert epilogue in ("", *EPILOGUES) and (rotation is None) == (epilogue != "rotate")
        self.weight = weight
        self.epilogue = epilogue
        self.rotation = rotation
        self.tuner = tuner or Tuner()
        # Epilogues always add a bias.
        self.bias = weight.new_zeros(len(weight)) if bias is None else bias
        self.width = len(weight) // (2 if epilogue in TWO_MATRICES else 1)
        self.backend = self._choose() if backend == "auto" else backend
        fuses_gelu = weight.dtype in cuda.HALF_TYPES or self.backend == "epilogue"
        self.gelu_in_gemm = epilogue == "gelu" and self.backend != "torch" and fuses_gelu
        # On a CPU torch's fused GELU is the exact form, not the tanh form.
        assert self.backend == "torch" or weight.is_cuda

    def _choose(self):
        if not self.weight.is_cuda or self.weight.dtype == torch.float64:
            return "torch"
        fused = self.epilogue in hopper.FUSED_EPILOGUES
        if fused and hopper.supports(self.weight, self.epilogue, self.rotation):
            return "hopper"
        return "tuned"

    @property
    def rotates(self) -> bool:
        """Return whether calls take `first`, the position of the first token."""
        return self.epilogue == "rotate"

    def shape(self, m: int) -> tuple[int, int, int, bool]:
        """Return (M, N, K, gelu) of the GEMM on M tokens, as the tuner takes them."""
        return (m, *self.weight.shape, self.gelu_in_gemm)

    def prepare(self, m: int) -> None:
        """Compile and load the kernels for M tokens. cuBLASLt's kernels are precompiled."""
        if self.backend == "hopper":
            hopper.load(self._tile(m), self)
        elif self.epilogue == "swiglu":
            EPILOGUES[self.epilogue](self.weight.new_zeros(1, len(self.weight)), EpilogueArgs())

    def parameters(self) -> Iterator[Tensor]:
        """Return the layer's tensors."""
        return iter((self.weight, self.bias))

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros in the shape of a result: (…, N), or (…, N/2) for two matrices."""
        return self.weight.new_zeros(*shape, self.width)

    def __call__(self, x: Tensor, **epilogue_args: Any) -> Any:
        """Apply the layer: x (…, K), contiguous → (…, N), or (…, N/2) for two matrices.

        epilogue_args: fields of EpilogueArgs. "rotate" takes x (N, t, K) and `first`, the position
        of the first of the t tokens. "modulate" takes stream (…, N/2), its sums of squares
        and eps. "residual" takes stream and gate (…, N), and returns the sums of squares of the new
        stream, (parts, M).
        """
        args = EpilogueArgs(self.rotation, x.shape[-2], **epilogue_args)
        if self.backend == "hopper" and not (self.rotates and ROTATION_PERIOD % args.tokens):
            return self._by_hopper(x, args)
        y = self._multiply(x)
        return y if self.gelu_in_gemm or not self.epilogue else EPILOGUES[self.epilogue](y, args)

    def _tile(self, m):
        multiprocessors = cuda.multiprocessors(self.weight.device)
        depth = self.weight.shape[1]
        return hopper.choose_tile(m, self.width, depth, self.epilogue, multiprocessors)

    def _by_hopper(self, x, args):
        """Compute the layer with hopper.cu."""
        m = x.numel() // x.shape[-1]
        tile = self._tile(m)
        out = None
        if self.epilogue == "residual":
            parts = tile.column_tiles(self.width, self.epilogue)
            args = args._replace(squares=torch.empty(parts, m, device=x.device))
        else:
            out = x.new_empty(*x.shape[:-1], self.width)
        hopper.launch(tile, self.epilogue, x, self.weight, self.bias, out, args)
        return args.squares if out is None else out

    def _multiply(self, x):
        """Return x·Wᵀ + b, or its GELU if the backend fuses GELU."""
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
            choice.gemm.run(choice.algorithm, x, self.weight, self.bias, out)
        return out
