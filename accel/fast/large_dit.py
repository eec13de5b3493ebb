"""The accelerated Large-DiT: the function of large_dit.DiT_Llama, laid out for a GPU as FastDiT is. What differs:

h ← adaLN(x)                               RMSNorm; its weight is folded into scale's projection
a ← wo(attention(rotated(qkv(h))))         q, k, v by one GEMM; their norm and rotation in place by one kernel
m ← w2(silu(w1·h) ∗ w3·h)                  w1 and w3 by one GEMM, SwiGLU by a kernel
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from accel.families.large_dit.network import rotation_table
from accel.fast.conditioning import Conditioning
from accel.fast.dit import FastDiT
from accel.kernels.linear import Linear, Tuner
from accel.kernels.qk_norm_rotary import qk_norm_rotary
from accel.kernels.swiglu import swiglu
from accel.precision import TIERS

RMS_EPS = 1e-5


def build(
    state: dict[str, Tensor],
    model: torch.nn.Module,
    tier: str,
    device: torch.device,
    tuner: Tuner | None = None,
    gemm: str = "auto",
) -> "FastLargeDiT":
    """The accelerated network of a tier. model: the module, for its sizes. Raises ValueError for the tier exact."""
    if tier == "exact":
        raise ValueError("precision 'exact' is for DiT only; take 'fp32'")
    return FastLargeDiT(state, model, TIERS[tier].dtype, device, tuner, gemm)


class SwiGLU(Linear):
    """The layers w1 and w3 as one GEMM, then silu(w1·x) ∗ w3·x. weight: w1's rows, then w3's."""

    def prepare(self, m: int) -> None:
        super().prepare(m)
        swiglu(self.zeros(1, 1))

    def __call__(self, x: Tensor) -> Tensor:
        """x (…, D), contiguous → (…, F)."""
        return swiglu(super().__call__(x))


class FastLargeDiT(FastDiT):
    """See the module's text.

    state: a Large-DiT's state dict, on any device. model: its module, for heads, channels, patch and input size. The
    other arguments are FastDiT's. The conditioning's weights are kept in `dtype`, since they are a tenth of the network
    or more; its arithmetic is float32.
    """

    def __init__(
        self,
        state: dict[str, Tensor],
        model: torch.nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        tuner: Tuner | None = None,
        gemm: str = "auto",
    ):
        self.in_channels, self.patch_size = model.in_channels, model.patch_size
        self.row_tokens = (model.input_size // model.patch_size) ** 2
        super().__init__(state, model.n_heads, dtype, device, tuner, gemm)

    def _load(self, state, take):
        self.depth = sum(name.endswith(".attention.wq.weight") for name in state)
        self.patches = take("x_embedder.weight")  # (D, C·p·p)
        self.width = len(self.patches)
        self.position = take("x_embedder.bias").expand(self.row_tokens, -1).contiguous()  # (T, D)
        side = self.width // self.num_heads
        self.rotation = rotation_table(side, self.row_tokens, self.stream_dtype, self.device)  # (T, d/2, 2)
        self.blocks = [self._block(f"layers.{i}", take) for i in range(self.depth)]
        self.norms = [self._norms(f"layers.{i}.attention", state, take) for i in range(self.depth)]
        self.final = take("final_layer.linear.weight"), take("final_layer.linear.bias")
        modulations = [f"layers.{i}.adaLN_modulation.1" for i in range(self.depth)]
        layers = [*modulations, "final_layer.adaLN_modulation.1"]
        self.conditioning = Conditioning(state, layers, take, self.dtype)
        for i in range(self.depth):
            self.conditioning.fold(6 * i + 1, take(f"layers.{i}.attention_norm.weight"))
            self.conditioning.fold(6 * i + 4, take(f"layers.{i}.ffn_norm.weight"))

    def _block(self, name, take):
        """The four GEMMs of block `name`."""

        def weights(*layers):
            return [take(f"{name}.{layer}.weight", self.dtype) for layer in layers]

        wq, wk, wv, wo = weights(*(f"attention.{layer}" for layer in ("wq", "wk", "wv", "wo")))
        w1, w2, w3 = weights(*(f"feed_forward.{layer}" for layer in ("w1", "w2", "w3")))
        how = dict(bias=None, tuner=self.tuner, backend=self.gemm)
        qkv = torch.cat([wq, self._for_every_head(wk), self._for_every_head(wv)])  # (3·D, D)
        return [Linear(qkv, **how), Linear(wo, **how), SwiGLU(torch.cat([w1, w3]), **how), Linear(w2, **how)]

    def _for_every_head(self, tensor):
        """Rows of the heads of keys or values, which several query heads may share → those of every query head."""
        heads = tensor.unflatten(0, (-1, self.width // self.num_heads))
        return heads.repeat_interleave(self.num_heads // len(heads), 0).flatten(0, 1)

    def _norms(self, name, state, take):
        """Weight and bias of the norm of queries, then of keys (2, 2, D); None if there is none."""
        if f"{name}.q_norm.weight" not in state:
            return None
        q, k = ([take(f"{name}.{part}_norm.{kind}") for kind in ("weight", "bias")] for part in "qk")
        return torch.stack([torch.stack(q), torch.stack([self._for_every_head(one) for one in k])])

    def parameters(self) -> Iterator[Tensor]:
        yield from super().parameters()
        yield from (norms for norms in self.norms if norms is not None)

    def adaptive_norm(self, x, modulation, vector, branches=()) -> Tensor:
        update = len(branches) == 2
        return self.adaln(x, modulation, vector, vector + 1, branches, update, self.dtype, rms_eps=RMS_EPS)

    def attend_in_block(self, block, qkv, attend, first=0) -> Tensor:
        qkv = qk_norm_rotary(qkv, self.rotation, first, self.norms[block], average=self.average)
        return attend(qkv, self.num_heads)
