"""The accelerated network: stages that a family packs, computed with the ops of a tier.

GEMMs in the tier's arithmetic around a float32 residual stream. One kernel does everything
between two GEMMs. What depends on (timestep, label) alone comes from a table. Per block:

    h ← adaLN(x)                fused adaLN kernel: reads x, writes h as the next GEMM takes it
    a ← proj(attention(qkv(h))) two GEMMs, one attention; some families rotate q and k before it
    h ← adaLN(x + gate·a)       x is not written: the next kernel adds a again, which is cheaper
    m ← fc2(act(fc1(h)))        two GEMMs; GELU or SwiGLU in the epilogue, or SwiGLU by a kernel
    x ← x + gate·a + gate·m     already in the next block's first kernel, h ← adaLN(x)
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.fast.conditioning import BLOCK_VECTORS, Conditioning, ConditioningTable
from accel.fast.ops import Block, Float32Linear, GemmWeights, HalfOps, SplitOps
from accel.kernels.adaln import Branches, Modulation
from accel.kernels.linear import Linear
from accel.runtime.network import BlockNetwork, RunState
from accel.runtime.stages import Stage

log = logging.getLogger(__name__)

# Places among a block's vectors. A shift is the first vector; a scale follows its shift.
ATTENTION_GATE = 2
MLP_SHIFT = 3
MLP_GATE = 5


class HeadStage(Protocol):
    """A family's way to compute the last stage and the last layer, in the loop's place."""

    def finish(
        self,
        network: "FastNetwork",
        x: Tensor,
        branches: Branches,
        embedded: Any,
        condition: Modulation,
        attend: Callable,
        first: int,
    ) -> Tensor:
        """Return the last tokens (N, t, p·p·C').

        x (N, t, D): of the stage before, to which its last branches are not added yet; the others
        as for `FastNetwork.forward_blocks`. first: position of the first token.
        """

    def warmup_calls(self, tokens: int) -> list[Callable[[], object]]:
        """Return calls that warm up its kernels for so many tokens of all rows."""


class Packing(NamedTuple):
    """A family's weights as the loop over stages takes them."""

    patch_size: int
    in_channels: int
    patches: Tensor  # (D, C·p·p): the patch embedding's weight
    position: Tensor  # (T, D): its bias, and the position embedding
    stages: list[Stage]  # of Blocks
    last_weight: Tensor  # (p·p·C', D), of the last layer
    last_bias: Tensor
    conditioning: Conditioning
    rms_eps: float | None = None  # of the blocks' RMSNorm; None: LayerNorm
    last_rms_eps: float | None = None  # likewise, of the last layer
    # Of the embeddings of stages that have one each; they add up to D.
    widths: tuple[int, ...] = ()
    # Computes the last stage and the last layer, in half tiers.
    head_stage: HeadStage | None = None


class FastNetwork(BlockNetwork):
    """The network of a packing, computed with `ops`.

    The ops, `captures` and `precomputes_conditioning` are attributes, so that a benchmark can
    replace one of them.
    """

    captures = True
    precomputes_conditioning = True

    def __init__(self, packing: Packing, ops: HalfOps | SplitOps):
        super().__init__()
        self.patch_size = packing.patch_size
        self.in_channels = packing.in_channels
        widths = packing.widths or (len(packing.patches),)
        # A tail, and the layers around it alone, compute in half precision. The error of the first
        # embedding would pass through all stages.
        half = packing.head_stage is not None
        self.embeddings = [
            Float32Linear(GemmWeights("the patch embedding", part), half=half and index > 0)
            for index, part in enumerate(packing.patches.split(widths))
        ]
        self.positions = [part.contiguous() for part in packing.position.split(widths, dim=1)]
        self.position = self.positions[0]
        self.stages = packing.stages
        self.head_stage = packing.head_stage
        last = GemmWeights("final_layer", packing.last_weight, packing.last_bias)
        self.last = Float32Linear(last, half=half)
        self.conditioning = packing.conditioning
        self.conditioning.freeze()
        self.ops = ops
        self.dtype = ops.dtype
        self.device = ops.device
        self.adaln = partial(ops.adaln, rms_eps=packing.rms_eps)
        self.last_adaln = partial(ops.last_adaln, rms_eps=packing.last_rms_eps)
        self.attention = ops.attention
        self.tuner = ops.tuner
        self.table: ConditioningTable | None = None  # of sampling runs

    def embed(self, x: Tensor, tokens: slice = slice(None), copies: int = 1) -> Any:
        """Embed latents as BlockNetwork.embed does; return a tuple for stages with their own."""
        patches = F.pixel_unshuffle(x.to(self.position.dtype), self.patch_size)
        patches = patches.flatten(2).transpose(1, 2)[:, tokens]  # (n, t, C·p·p)
        operand = self.embeddings[0].operand(patches)
        embedded = []
        for layer, position in zip(self.embeddings, self.positions):
            h = layer(operand, position[tokens])  # (n, t, D)
            embedded.append(h.repeat(copies, 1, 1) if copies > 1 else h)
        return tuple(embedded) if len(embedded) > 1 else embedded[0]

    def condition(self, t: Tensor, y: Tensor) -> Modulation:
        return Modulation(self.conditioning(t, y), torch.arange(len(t), device=t.device))

    def forward_blocks(self, h, condition, attend, tokens=slice(None)) -> Tensor:
        x = h
        modulation = condition
        first = tokens.start or 0
        branches: Branches = ()  # of the last block so far; the next adaLN adds them to x
        for stage in self.stages:
            if self.head_stage and stage is self.stages[-1]:
                return self.head_stage.finish(self, x, branches, h, condition, attend, first)
            if branches:
                self.adaln(x, modulation, 0, branches)  # for the sum alone, which it leaves in x
            modulation = stage.modulate(x, condition)
            x = stage.enter(x, h, condition)  # (N, t, D)
            branches = self._apply(stage, x, modulation, attend, first)
        shift = BLOCK_VECTORS * len(stage.blocks)
        out = self.last_adaln(x, modulation, shift, branches)[:, stage.prepended :]
        return self.last(out)  # (N, t, p·p·C')

    def _apply(
        self, stage: Stage, x: Tensor, modulation: Modulation, attend: Callable, first: int
    ) -> Branches:
        """Apply a stage's blocks to tokens x (N, t, D), in place.

        first: position of the first token. Returns the last block's branches, which are not yet
        added to x.
        """
        branches: Branches = ()
        for index, block in enumerate(stage.blocks):
            vectors = BLOCK_VECTORS * index  # of the block: its first
            h = self.adaln(x, modulation, vectors, branches)  # (N, t, D)
            a = block.proj(self.attend(stage, block, h, attend, first))  # type: ignore[arg-type]
            attended = (a, vectors + ATTENTION_GATE)
            h = self.adaln(x, modulation, vectors + MLP_SHIFT, (attended,))
            m = self._mlp(block, h)
            branches = (attended, (m, vectors + MLP_GATE))
        return branches

    def attend(self, stage: Stage, block: Block, h: Tensor, attend: Callable, first: int) -> Tensor:
        """Return attention of a block's queries, keys and values of h (N, t, D)."""
        qkv: Any = block.qkv
        rotates = isinstance(qkv, Linear) and qkv.rotates
        packed = qkv(h, first=first) if rotates else qkv(h)  # (N, t, 3·D)
        if block.rotate:
            packed = block.rotate(packed, first=first)
        return attend(packed, stage.num_heads)

    def _mlp(self, block, h):
        """Return the MLP branch of a block (N, t, D)."""
        hidden = block.fc1(h)
        if block.activate:
            hidden = block.activate(hidden)
        return block.fc2(hidden)

    def prepare(self, times: list[float], labels: list[int], at_once: int = 1) -> RunState:
        if not self.precomputes_conditioning:
            return super().prepare(times, labels, at_once)
        least = len(set(labels)) * at_once
        if self.table is None or self.table.capacity < least:
            self.graphs.clear()  # they look vectors up in the old table
            self.table = None  # free its memory first
            self.table = ConditioningTable(self.conditioning, least=least)
        self.table.begin(times, labels, at_once)
        return self.table

    def overflowed(self) -> str | None:
        return self.ops.overflowed()

    def parameters(self) -> Iterator[Tensor]:
        for layer in self.embeddings:
            yield from layer.parameters()
        yield from self.positions
        yield from self.last.parameters()
        yield from self.conditioning.parameters()
        for stage in self.stages:
            for block in stage.blocks:
                yield from parameters_of(block)

    def tune(self, row_tokens: Iterable[int]) -> None:
        gemms = []
        for m in sorted(set(row_tokens)):
            rows = m // len(self.position)
            layers = [(layer, m) for layer in self.conditioning.gemms]
            for stage in self.stages:
                tokens = m + rows * stage.prepended
                layers += [(layer, tokens) for layer in stage.blocks[0].gemms]
            tuned = [layer.shape(tokens) for layer, tokens in layers if layer.backend == "tuned"]
            gemms += [(*shape, self.dtype, self.device) for shape in tuned]
        if self.tuner is None or not gemms:
            return
        before = len(self.tuner.seconds)
        self.tuner.share_choices(gemms)
        seconds = self.tuner.seconds[before:]
        if seconds:
            log.warning(
                f"GEMMs measured for this GPU: {len(seconds)} in {sum(seconds):.1f} s; "
                "later runs find what was chosen"
            )


def parameters_of(block: Block) -> Iterator[Tensor]:
    """Return the tensors of a block."""
    for layer in block.gemms:
        yield from layer.parameters()
    if block.rotation is not None:
        yield block.rotation.rotation
        if block.rotation.norms is not None:
            yield block.rotation.norms
