"""Pack JiT's weights for the accelerated network: LightningDiT's blocks in two stages.

Both projections of a patch become one matrix. The conditioning has one more vector, the label's
embedding, from which the label tokens are made.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from accel.families.blocks import EPS
from accel.families.jit.network import JiT, rotations
from accel.families.large_dit.fast import fold_norms
from accel.families.lightning_dit.fast import LAST_NORM, block, norms_of
from accel.fast.conditioning import BLOCK_VECTORS, Conditioning
from accel.fast.network import Packing
from accel.fast.ops import DirectOps, SplitOps
from accel.fast.reader import Reader
from accel.kernels.adaln import Modulation
from accel.runtime.stages import Stage


class LabelledConditioning(Conditioning):
    """Conditioning whose last vector is the label's embedding. front (F, D): position embedding of
    the label tokens.
    """

    def __init__(self, read: Reader, layers: list[str], sinusoid):
        super().__init__(read, layers, sinusoid)
        self.vectors += 1
        self.front = read("in_context_posemb")[0]

    def parameters(self) -> Iterator[Tensor]:
        yield from super().parameters()
        yield self.front

    def __call__(self, t: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        out = super().__call__(t, y, out)
        out[:, -1] = self.labels[y]
        return out

    def prepend_label(self, x: Tensor, embedded: Tensor, condition: Modulation) -> Tensor:
        """Put the label tokens in front of x (N, T, D) → (N, F + T, D)."""
        label = condition.table[condition.entry, -1]  # (N, D)
        return torch.cat([label[:, None] + self.front, x], dim=1)


def pack(read: Reader, model: JiT, ops: DirectOps | SplitOps) -> Packing:
    """Pack a JiT's state dict.

    model: for heads, grid, the first block with label tokens and the timestep embedding.
    """
    names = read.blocks("attn.qkv.weight")
    layers = [f"{name}.adaLN_modulation.1" for name in (*names, "final_layer")]
    conditioning = LabelledConditioning(read, layers, model.t_embedder.timestep_embedding)
    fold_norms(read, [*norms_of(names), LAST_NORM], conditioning)
    first = read("x_embedder.proj1.weight")  # (B, C, p, p)
    second = read("x_embedder.proj2.weight").flatten(1)  # (D, B)
    patches = second.double() @ first.flatten(1).double()  # (D, C·p·p)
    width = len(second)
    heads = model.num_heads
    front = len(conditioning.front)

    def stage(names, front):
        rotation = rotations(width // heads, model.side, front, ops.stream, ops.device)
        blocks = [block(read, name, ops, heads, rotation) for name in names]
        return Stage(blocks, width, heads, prepended=front)

    before = [name for name in names if int(name.rpartition(".")[2]) < model.in_context_start]
    vectors = BLOCK_VECTORS * len(before)  # of the first stage

    def later_vectors(x: Tensor, condition: Modulation) -> Modulation:
        return condition._replace(table=condition.table[:, vectors:])

    later = stage(names[len(before) :], front)
    return Packing(
        patch_size=first.shape[-1],
        in_channels=first.shape[1],
        patches=patches.to(ops.stream),
        position=read("pos_embed")[0] + read("x_embedder.proj2.bias"),
        stages=[
            stage(before, 0),
            later._replace(enter=conditioning.prepend_label, modulate=later_vectors),
        ],
        last_weight=read("final_layer.linear.weight"),
        last_bias=read("final_layer.linear.bias"),
        conditioning=conditioning,
        rms_eps=EPS,
        last_rms_eps=EPS,
    )
