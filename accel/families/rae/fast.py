"""Pack RAE's weights for the accelerated network: LightningDiT's blocks in two stages.

The modulation vectors of the trunk, and the time's embedding τ, come from a table. Each token has
its own vectors for the head:

    s ← projected(SiLU(τ + s))                      (N, T, W)
    vectors ← Linear(SiLU(s))                       (N, T, 14, W) of two blocks

One GEMM computes them (`TokenConditioning`), and they stay in its result dtype. For 64 rows of 256
tokens they take 0.94 GB in half precision; every adaLN would read 1.88 GB in float32. The rounding
is small against the GEMM's own error.

In half precision on Hopper (`FusedHead`) the GEMM that makes shifts and scales also modulates the
residual stream, so only the gates are stored, for the GEMMs that add to the stream.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.families.blocks import EPS
from accel.families.large_dit.fast import fold_norms
from accel.families.lightning_dit import fast as lightning_dit
from accel.families.lightning_dit.fast import LAST_NORM, norms_of
from accel.families.rae.network import DiTwDDTHead, fourier
from accel.fast.conditioning import Conditioning
from accel.fast.network import FastNetwork, Packing
from accel.fast.ops import DirectOps, GemmWeights, SplitOps
from accel.fast.reader import Reader
from accel.kernels.adaln import Branches, Modulation
from accel.kernels.rows import row_squares, silu_sum
from accel.runtime.precision import true_float32
from accel.runtime.stages import Stage

PROJECTOR = "s_projector"


class TrunkConditioning(Conditioning):
    """Conditioning of the trunk's blocks, whose last vector is the time's embedding.

    trunk: names of the blocks.
    """

    def __init__(self, read: Reader, trunk: list[str]):
        layers = [f"{name}.adaLN_modulation.1" for name in trunk]
        super().__init__(read, layers, lambda t, width: fourier(t, self.frequencies))
        self.vectors += 1
        self.frequencies = read("t_embedder.W")

    def parameters(self) -> Iterator[Tensor]:
        yield from super().parameters()
        yield self.frequencies

    def embed(self, t: Tensor, y: Tensor) -> Tensor:
        return F.silu(super().embed(t, y))

    def __call__(self, t: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        out = super().__call__(t, y, out)
        with true_float32():
            out[:, -1] = self.embed_time(t)
        return out


class TokenConditioning(TrunkConditioning):
    """TrunkConditioning with the layers that make the head's vectors from the trunk's tokens.

    head: names of the head's blocks.
    """

    def __init__(self, read: Reader, trunk: list[str], head: list[str], ops: DirectOps | SplitOps):
        super().__init__(read, trunk)
        self.operand: Callable[[Tensor], Any] = ops.operand
        projector = read.layer(PROJECTOR, ops.dtype)
        self.head_width = len(projector.weight)
        weight, bias = _head_vectors(read, head, self.head_width)
        name = "adaLN_modulation of the head"
        weight = weight.flatten(0, 1).to(ops.dtype)
        vectors = GemmWeights(name, weight, bias.flatten().to(ops.dtype))
        self.gemms = (ops.linear(projector), ops.linear(vectors))

    def modulate_tokens(self, x: Tensor, condition: Modulation) -> Modulation:
        """Return the head's modulation from the trunk's tokens x (N, T, D)."""
        projector, vectors_of = self.gemms
        time = condition.table[condition.entry, -1]  # (N, D)
        s = projector(self.operand(F.silu(x + time.unsqueeze(1))))  # (N, T, W)
        vectors = vectors_of(self.operand(F.silu(s)))  # (N, T, V·W)
        entry = torch.arange(x[..., 0].numel(), device=x.device).view(x.shape[:2])
        return Modulation(vectors.view(entry.numel(), -1, self.head_width), entry)


class FusedHead(TrunkConditioning):
    """TrunkConditioning that is also a HeadStage, with the layers that modulate the head.

    head: names of the head's blocks. stage: the packed blocks, set by `pack`.
    """

    stage: Stage

    def __init__(self, read: Reader, trunk: list[str], head: list[str], ops: DirectOps):
        super().__init__(read, trunk)
        self.dtype = ops.dtype
        projector = read.layer(PROJECTOR, ops.dtype)
        self.head_width = len(projector.weight)
        weight, bias = (
            vectors.to(ops.dtype) for vectors in _head_vectors(read, head, self.head_width)
        )

        def layer(rows, epilogue=""):
            name = "adaLN_modulation of the head"
            gemm = GemmWeights(name, weight[rows].flatten(0, 1), bias[rows].flatten())
            return ops.linear(gemm, epilogue)

        # Each norm has a shift, a scale and a gate, the last one no gate. Its layer takes the scale
        # first.
        norms = [layer([3 * i + 1, 3 * i], "modulate") for i in range(2 * len(head) + 1)]
        gates = layer(slice(2, None, 3))
        self.gemms = (ops.linear(projector, "silu"), gates, *norms)

    def finish(
        self,
        network: FastNetwork,
        x: Tensor,
        branches: Branches,
        embedded: Any,
        condition: Modulation,
        attend: Callable,
        first: int,
    ) -> Tensor:
        """See HeadStage."""
        projector, gates_of, *norms = self.gemms
        time = condition.table.shape[1] - 1  # the last vector
        s = projector(silu_sum(x, condition, time, branches, self.dtype))  # (N, t, W)
        gates = gates_of(s).unflatten(-1, (-1, self.head_width))  # (N, t, 4, W) of two blocks
        x = self.stage.enter(x, embedded, condition)  # (N, t, W)
        squares = row_squares(x)
        for index, block in enumerate(self.stage.blocks):
            attention_gate, mlp_gate = gates[:, :, 2 * index : 2 * index + 2].unbind(2)
            h = norms[2 * index](s, stream=x, squares=squares, eps=EPS)  # (N, t, W)
            a = network.attend(self.stage, block, h, attend, first)
            squares = block.proj(a, stream=x, gate=attention_gate)
            h = norms[2 * index + 1](s, stream=x, squares=squares, eps=EPS)
            squares = block.fc2(block.fc1(h), stream=x, gate=mlp_gate)
        return network.last(norms[-1](s, stream=x, squares=squares, eps=EPS))

    def warmup_calls(self, tokens: int) -> list[Callable[[], object]]:
        """See HeadStage."""
        return [self._warm_rows, *(partial(layer.prepare, tokens) for layer in self.gemms)]

    def _warm_rows(self):
        """Run the row kernels on one token of zeros."""
        x = self.bias.new_zeros(1, 1, len(self.time_mlp[3]))
        condition = Modulation(x, torch.zeros(1, dtype=torch.int64, device=x.device))
        silu_sum(x, condition, 0, ((x.to(self.dtype), 0),) * 2, self.dtype)
        row_squares(x.new_zeros(1, 1, self.head_width))


def _head_vectors(read: Reader, blocks: list[str], width: int) -> tuple[Tensor, Tensor]:
    """Return weight (V, W, W) and bias (V, W) of all vectors of `blocks` and the last layer.

    The norms' weights are folded into the scales, as in Conditioning.fold.
    """
    layers = [f"{name}.adaLN_modulation.1" for name in (*blocks, "final_layer")]
    weight = torch.cat([read(f"{layer}.weight").view(-1, width, width) for layer in layers])
    bias = torch.cat([read(f"{layer}.bias").view(-1, width) for layer in layers])  # (V, W)
    gains = torch.stack([read(f"{norm}.weight") for norm in (*norms_of(blocks), LAST_NORM)])
    # Each norm has three vectors; the scale is the second.
    weight[1::3] *= gains[..., None]
    bias[1::3] = gains * (1 + bias[1::3]) - 1
    return weight, bias


def pack(read: Reader, model: DiTwDDTHead, ops: DirectOps | SplitOps) -> Packing:
    """Pack a DiTwDDTHead's state dict.

    model: for heads and numbers of blocks.
    """
    names = read.blocks("attn.qkv.weight")
    trunk = [name for name in names if int(name.rpartition(".")[2]) < model.num_encoder_blocks]
    head = names[len(trunk) :]
    # In a network of zeros with one block per stage, the head's block stands for all of its blocks,
    # so that GEMMs have their real size.
    missing = len(model.blocks) - model.num_encoder_blocks - len(head)
    modulated = head + head[:1] * missing
    conditioning: FusedHead | TokenConditioning
    if isinstance(ops, DirectOps) and ops.updates_stream:
        conditioning = FusedHead(read, trunk, modulated, ops)
    else:
        conditioning = TokenConditioning(read, trunk, modulated, ops)
    fold_norms(read, norms_of(trunk), conditioning)
    trunk_patches = read("s_embedder.proj.weight")  # (D, C, 1, 1)
    head_patches = read("x_embedder.proj.weight")  # (W, C, 1, 1)
    positions = read("pos_embed")[0] + read("s_embedder.proj.bias")  # (T, D)
    bias = read("x_embedder.proj.bias").expand(len(positions), -1)  # (T, W)

    def stage(names, width, heads, rope, index, **options):
        cos = read(f"{rope}.freqs_cos")
        sin = read(f"{rope}.freqs_sin")
        rotation = torch.stack([cos, sin], dim=-1)[:, ::2].contiguous()  # (T, d/2, 2)
        return Stage(
            [lightning_dit.block(read, name, ops, heads, rotation, **options) for name in names],
            width,
            heads,
            enter=lambda x, embedded, condition: embedded[index],
        )

    heads, wide_heads = model.heads
    widths = (len(trunk_patches), len(head_patches))
    stages = [stage(trunk, widths[0], heads, "enc_feat_rope", 0)]
    head_stage = None
    if isinstance(conditioning, FusedHead):
        options = dict(updates_stream=True)
        conditioning.stage = stage(head, widths[1], wide_heads, "dec_feat_rope", 1, **options)
        stages.append(conditioning.stage)
        head_stage = conditioning
    else:
        wide = stage(head, widths[1], wide_heads, "dec_feat_rope", 1)
        stages.append(wide._replace(modulate=conditioning.modulate_tokens))
    return Packing(
        patch_size=1,
        in_channels=trunk_patches.shape[1],
        patches=torch.cat([trunk_patches, head_patches]).flatten(1),  # (D + W, C)
        position=torch.cat([positions, bias], dim=1),
        stages=stages,
        # Negated: the original's velocity is noise − data.
        last_weight=-read("final_layer.linear.weight"),
        last_bias=-read("final_layer.linear.bias"),
        conditioning=conditioning,
        rms_eps=EPS,
        last_rms_eps=EPS,
        widths=widths,
        head_stage=head_stage,
    )
