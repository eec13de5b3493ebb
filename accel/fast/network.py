"""The accelerated network: blocks that a family lays out, computed with the ops of a
tier, on a rank's part of them.

GEMMs in the tier's arithmetic around a float32 residual stream. One kernel does
everything between two GEMMs. What depends on (timestep, label) alone comes from a table.
Per block:

    h ← adaLN(x)                               fused adaLN kernel: reads x, writes h as the next
                                               GEMM takes it
    a ← proj(attention(qkv(h)))                two GEMMs, one attention; some families rotate q and
                                               k before it
    h ← adaLN(x + gate·a)                      x is not written: the next kernel adds a again, which
                                               is cheaper
    m ← fc2(act(fc1(h)))                       two GEMMs; GELU in the epilogue, SwiGLU by a kernel
    x ← x + gate·a + gate·m,  h ← adaLN(x)     this is already the next block's first kernel

Ranks that divide the weights sum a and m.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.fast.conditioning import Conditioning, ConditioningTable
from accel.fast.ops import Block, Half, Split
from accel.kernels.adaln import Modulation
from accel.network import BlockNetwork
from accel.precision import true_float32


class Layout(NamedTuple):
    """A family's weights as the loop takes them."""

    patch_size: int
    in_channels: int
    num_heads: int
    patches: Tensor  # (D, C·p·p): the patch embedding's weight
    position: Tensor  # (T, D): its bias, and the position embedding
    blocks: list[Block]
    final: tuple[Tensor, Tensor]  # the last layer's weight (p·p·C', D) and bias
    conditioning: Conditioning
    rms_eps: float | None = None  # of the blocks' RMSNorm; None: LayerNorm
    last_rms_eps: float | None = None  # likewise, of the last layer


class FastNetwork(BlockNetwork):
    """See the module's text.

    The ops of a step, and whether it is captured and hoists its conditioning, are
    attributes: a benchmark replaces one of them.
    """

    captures = hoists = True

    def __init__(self, layout: Layout, ops: Half | Split):
        super().__init__()
        self.patch_size = layout.patch_size
        self.in_channels = layout.in_channels
        self.patches = layout.patches
        self.position = layout.position
        self.final = layout.final
        self.blocks = layout.blocks
        self.conditioning = layout.conditioning
        self.depth = len(self.blocks)
        self.width = len(self.patches)
        self.num_heads = layout.num_heads // ops.part.ranks
        self.part = ops.part
        self.dtype = ops.dtype
        self.device = ops.device
        self.adaln = partial(ops.adaln, rms_eps=layout.rms_eps)
        self.last_adaln = partial(ops.last_adaln, rms_eps=layout.last_rms_eps)
        self.attention = ops.attention
        self.overflowed = ops.overflowed
        self.tuner = ops.tuner
        self.exchanges = ops.exchanges
        self.table = None  # of sampling runs

    def embed(self, x: Tensor, tokens: slice = slice(None), copies: int = 1) -> Tensor:
        # (n, C·p·p, H/p, W/p)
        patches = F.pixel_unshuffle(x.to(self.position.dtype), self.patch_size)
        with true_float32():
            h = F.linear(patches.flatten(2).transpose(1, 2)[:, tokens], self.patches)  # (n, t, D)
        return (h.expand(copies, *h.shape) + self.position[tokens]).flatten(0, 1)

    def condition(self, t: Tensor, y: Tensor) -> Modulation:
        return Modulation(self.conditioning(t, y), torch.arange(len(t), device=t.device))

    def forward_blocks(self, h, condition, attend, tokens=slice(None)) -> Tensor:
        x = h
        first = tokens.start or 0
        total = self.part.sum
        h = self.adaln(x, condition, 0)  # (N, t, D)
        for i in range(self.depth):
            (qkv, proj, fc1, fc2), rotate, activate, _ = self.blocks[i]
            gate_msa, shift_mlp, gate_mlp, following = (6 * i + vector for vector in (2, 3, 5, 6))
            packed = qkv(h)  # (N, t, 3·D)
            if rotate:
                packed = rotate(packed, first)
            a = total(proj(attend(packed, self.num_heads)))  # (N, t, D)
            h = self.adaln(x, condition, shift_mlp, ((a, gate_msa),))
            hidden = fc1(h)
            if activate:
                hidden = activate(hidden)
            m = total(fc2(hidden))  # (N, t, D)
            branches = (a, gate_msa), (m, gate_mlp)
            if i + 1 < self.depth:
                h = self.adaln(x, condition, following, branches)
        with true_float32():
            # (N, t, p·p·C')
            return F.linear(self.last_adaln(x, condition, following, branches), *self.final)

    def schedule(self, times, labels, at_once=1) -> tuple[BlockNetwork, Callable[..., None]]:
        if not self.hoists:
            return super().schedule(times, labels, at_once)
        least = len(set(labels)) * at_once
        if self.table is None or self.table.capacity < least:
            self.table = None  # free its memory first
            self._replayed.clear()  # they look vectors up in it
            self.table = ConditioningTable(self.conditioning, least=least)
        self.table.begin(times, labels, at_once)
        return self.conditioned(self.table.modulation), self.table.advance

    def parameters(self) -> Iterator[Tensor]:
        yield from (self.patches, self.position, *self.final, *self.conditioning.parameters())
        for block in self.blocks:
            for layer in block.gemms:
                yield from layer.parameters()
            if block.norms is not None:
                yield block.norms

    def tune(self, row_tokens: Iterable[int]) -> None:
        tuned = [layer for layer in self.blocks[0].gemms if layer.backend == "tuned"]
        gemms = [
            (*layer.shape(m), self.dtype, self.device)
            for m in sorted(set(row_tokens))
            for layer in tuned
        ]
        if not gemms:
            return
        before = len(self.tuner.seconds)
        self.tuner.choose_alike(gemms)
        if taken := self.tuner.seconds[before:]:
            print(
                f"GEMMs measured for this GPU: {len(taken)} in {sum(taken):.1f} s; later runs "
                "find what was chosen"
            )
