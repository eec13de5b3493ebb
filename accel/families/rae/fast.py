"""Pack RAE's weights for the accelerated network: LightningDiT's blocks in two stages.

The trunk's vectors come from a table, and with them the embedding of the time, τ. The head's are a
token's: one GEMM computes those of all its blocks and of the last layer,

    s ← projected(SiLU(τ + s))                      (N, T, W)
    vectors ← Linear(SiLU(s))                       (N, T, 14, W) of two blocks

They stay in the GEMM's result dtype: of 64 rows of 256 tokens they take 0.94 GB in half precision,
and 1.88 GB in float32, which every adaLN would read. Rounding them adds little to the error of the
GEMM that makes them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.families.large_dit.fast import fold_norms
from accel.families.lightning_dit.fast import LAST_NORM, block, norms_of
from accel.families.lightning_dit.network import EPS
from accel.families.rae.network import DiTwDDTHead, fourier
from accel.fast.conditioning import Conditioning
from accel.fast.network import Packing
from accel.fast.ops import Half, Split, Weights
from accel.fast.reader import Reader
from accel.kernels.adaln import Modulation
from accel.network import Stage
from accel.precision import true_float32

PROJECTOR = "s_projector"


class TokenConditioning(Conditioning):
    """Conditioning of the trunk's blocks, whose last vector is the time's embedding, and the layers
    that make the head's vectors of the trunk's tokens. trunk, head: names of blocks.
    """

    def __init__(self, read: Reader, trunk: list[str], head: list[str], ops: Half | Split):
        layers = [f"{name}.adaLN_modulation.1" for name in trunk]
        super().__init__(read, layers, lambda t, width: fourier(t, self.frequencies))
        self.vectors += 1
        self.frequencies = read("t_embedder.W")
        self.operand: Callable[[Tensor], Any] = ops.operand
        projector = read.layer(PROJECTOR, ops.dtype)
        self.head_width = len(projector.weight)
        self.gemms = (
            ops.linear(projector),
            ops.linear(_head_vectors(read, head, self.head_width, ops.dtype)),
        )

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

    def modulate_tokens(self, x: Tensor, condition: Modulation) -> Modulation:
        """Return the head's modulation from the trunk's tokens x (N, T, D)."""
        projector, vectors_of = self.gemms
        time = condition.table[condition.entry, -1]  # (N, D)
        s = projector(self.operand(F.silu(x + time.unsqueeze(1))))  # (N, T, W)
        vectors = vectors_of(self.operand(F.silu(s)))  # (N, T, V·W)
        entry = torch.arange(x[..., 0].numel(), device=x.device).view(x.shape[:2])
        return Modulation(vectors.view(entry.numel(), -1, self.head_width), entry)


def _head_vectors(read: Reader, blocks: list[str], width: int, dtype: torch.dtype) -> Weights:
    """Return the GEMM of the vectors of `blocks` and of the last layer.

    The norms' weights are folded into the scales, as Conditioning.fold does.
    """
    layers = [f"{name}.adaLN_modulation.1" for name in (*blocks, "final_layer")]
    weight = torch.cat([read(f"{layer}.weight").view(-1, width, width) for layer in layers])
    bias = torch.cat([read(f"{layer}.bias").view(-1, width) for layer in layers])  # (V, W)
    gains = torch.stack([read(f"{norm}.weight") for norm in (*norms_of(blocks), LAST_NORM)])
    # Every norm has a scale, the second of the three vectors that belong to it.
    weight[1::3] *= gains[..., None]
    bias[1::3] = gains * (1 + bias[1::3]) - 1
    name = "adaLN_modulation of the head"
    return Weights(name, weight.flatten(0, 1).to(dtype), bias.flatten().to(dtype))


def pack(read: Reader, model: DiTwDDTHead, ops: Half | Split) -> Packing:
    """Pack a DiTwDDTHead's state dict.

    model: gives heads and the numbers of blocks.
    """
    names = read.blocks("attn.qkv.weight")
    trunk = [name for name in names if int(name.rpartition(".")[2]) < model.num_encoder_blocks]
    head = names[len(trunk) :]
    # Where each stage has its first block alone, that stands for the head's others: GEMMs have the
    # size that will run.
    missing = len(model.blocks) - model.num_encoder_blocks - len(head)
    conditioning = TokenConditioning(read, trunk, head + head[:1] * missing, ops)
    fold_norms(read, norms_of(trunk), conditioning)
    of_trunk = read("s_embedder.proj.weight")  # (D, C, 1, 1)
    of_head = read("x_embedder.proj.weight")  # (W, C, 1, 1)
    positions = read("pos_embed")[0] + read("s_embedder.proj.bias")  # (T, D)
    bias = read("x_embedder.proj.bias").expand(len(positions), -1)  # (T, W)
    widths = (len(of_trunk), len(of_head))

    def stage(names, width, heads, rope, index):
        cos = read(f"{rope}.freqs_cos")
        sin = read(f"{rope}.freqs_sin")
        rotation = torch.stack([cos, sin], dim=-1)[:, ::2].contiguous()  # (T, d/2, 2)
        return Stage(
            [block(read, name, ops, heads, rotation) for name in names],
            width,
            heads,
            enter=lambda x, embedded, condition: embedded[index],
        )

    heads, wide_heads = model.heads
    wide = stage(head, widths[1], wide_heads, "dec_feat_rope", 1)
    return Packing(
        patch_size=1,
        in_channels=of_trunk.shape[1],
        patches=torch.cat([of_trunk, of_head]).flatten(1),  # (D + W, C)
        position=torch.cat([positions, bias], dim=1),
        stages=[
            stage(trunk, widths[0], heads, "enc_feat_rope", 0),
            wide._replace(modulate=conditioning.modulate_tokens),
        ],
        last_weight=-read("final_layer.linear.weight"),  # of a velocity from noise to data
        last_bias=-read("final_layer.linear.bias"),
        conditioning=conditioning,
        rms_eps=EPS,
        last_rms_eps=EPS,
        widths=widths,
    )
