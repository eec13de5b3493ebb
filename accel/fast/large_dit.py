"""The accelerated Large-DiT: the function of large_dit.DiT_Llama, laid out for a GPU as FastDiT is. What differs:

h ← adaLN(x)                               RMSNorm; its weight is folded into scale's projection
a ← wo(attention(rotated(qkv(h))))         q, k, v by one GEMM; their norm and rotation in place by one kernel
m ← w2(silu(w1·h) ∗ w3·h)                  w1 and w3 by one GEMM, SwiGLU by a kernel
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from accel.fast.conditioning import Conditioning
from accel.fast.dit import FastDiT, Optimisations
from accel.kernels.adaln import adaln
from accel.kernels.linear import Linear, Tuner
from accel.kernels.qk_norm_rotary import qk_norm_rotary
from accel.kernels.swiglu import swiglu
from accel.precision import TIERS
from large_dit import rotation_table

RMS_EPS = 1e-5


def build(
    state: dict[str, Tensor],
    model: torch.nn.Module,
    tier: str,
    device: torch.device,
    optimisations: Optimisations = Optimisations(),  # noqa: B008 (frozen)
    tuner: Tuner | None = None,
) -> "FastLargeDiT":
    """The accelerated network of a tier. model: the module, for its sizes. Raises ValueError for the tier exact."""
    if tier == "exact":
        raise ValueError("precision 'exact' is for DiT only; take 'fp32'")
    return FastLargeDiT(state, model, TIERS[tier].dtype, device, optimisations, tuner)


class SwiGLU(Linear):
    """The layers w1 and w3 as one GEMM, then silu(w1·x) ∗ w3·x. weight: w1's rows, then w3's."""

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
        optimisations: Optimisations = Optimisations(),  # noqa: B008 (frozen)
        tuner: Tuner | None = None,
    ):
        self.in_channels, self.patch_size = model.in_channels, model.patch_size
        self.row_tokens = (model.input_size // model.patch_size) ** 2
        self.average = None  # over ranks that divide the heads
        super().__init__(state, model.n_heads, dtype, device, optimisations, tuner)

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
        how = dict(bias=None, tuner=self.tuner, backend=self.optimisations.gemm)
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

    def _adaln(self, x, modulation, vector, branches=()):
        update, backend = len(branches) == 2, self.optimisations.adaln
        return adaln(x, modulation, vector, vector + 1, branches, update, self.dtype, backend, RMS_EPS)

    def forward_blocks(self, h, condition, *, attend=None, tokens=slice(None)) -> Tensor:
        attend, norms = attend or self.attention, iter(self.norms)

        def attend_rotated(qkv, num_heads):  # once a block, in order
            return attend(self._rotated(qkv, tokens.start or 0, next(norms)), num_heads)

        return super().forward_blocks(h, condition, attend=attend_rotated, tokens=tokens)

    def _rotated(self, qkv, first, norms):
        return qk_norm_rotary(qkv, self.rotation, first, norms, self.optimisations.adaln, self.average)

    def divide(self, rank: int, ranks: int, all_reduce: Callable[[Tensor], object]) -> None:
        def average(x):
            all_reduce(x)
            return x / ranks

        super().divide(rank, ranks, all_reduce)
        self.average = average
        self.norms = [norms if norms is None else norms.chunk(ranks, -1)[rank].contiguous() for norms in self.norms]

    def kernel_calls(self, latents: Tensor, *how) -> list[Callable[[], object]]:
        qkv, hidden = (self.position.new_zeros(1, 1, len(self.blocks[0][i].weight), dtype=self.dtype) for i in (0, 2))
        between = partial(self._rotated, qkv, 0, self.norms[0]), partial(swiglu, hidden)
        return [*super().kernel_calls(latents, *how), *between]
