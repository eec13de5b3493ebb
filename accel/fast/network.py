"""The accelerated network: packed stages, computed with the ops of a tier.

GEMMs use the tier's arithmetic; the residual stream is float32. Between two GEMMs there is one
kernel. Modulation vectors come from a table (conditioning.py). Per block:

    h ← adaLN(x)                fused adaLN kernel: reads x, writes h as the next GEMM's operand
    a ← proj(attention(qkv(h))) two GEMMs and attention; some families rotate q and k
    h ← adaLN(x + gate·a)       does not write x: it is cheaper to add gate·a again below
    m ← fc2(act(fc1(h)))        two GEMMs; the activation is an epilogue, or a kernel
    x ← x + gate·a + gate·m     part of the next block's first kernel, h ← adaLN(x)
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.fast.conditioning import BLOCK_VECTORS, Conditioning, ConditioningTable
from accel.fast.ops import Block, DirectOps, Float32Linear, GemmWeights, SplitOps
from accel.kernels.adaln import Branches, Modulation
from accel.kernels.linear import Linear
from accel.runtime.network import BlockNetwork, RunState
from accel.runtime.stages import Stage

log = logging.getLogger(__name__)

# Indices among a block's vectors. The attention's shift is 0; each scale follows its shift.
ATTENTION_GATE = 2
MLP_SHIFT = 3
MLP_GATE = 5


class HeadStage(Protocol):
    """A family's implementation of the last stage and the last layer."""

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
        """Return the last layer's tokens (N, t, p·p·C').

        x (N, t, D): tokens of the previous stage, before its last `branches` are added. embedded,
        condition, attend: as for `FastNetwork.forward_blocks`. first: position of the first token.
        """

    def warmup_calls(self, tokens: int) -> list[Callable[[], object]]:
        """Return functions that warm up the kernels for `tokens` tokens of all rows."""


class Packing(NamedTuple):
    """A family's weights in the layout that FastNetwork computes with."""

    patch_size: int
    in_channels: int
    patches: Tensor  # (D, C·p·p): weight of the patch embedding
    position: Tensor  # (T, D): position embedding + bias of the patch embedding
    stages: list[Stage]  # their blocks are of type Block
    last_weight: Tensor  # (p·p·C', D): the last layer
    last_bias: Tensor
    conditioning: Conditioning
    rms_eps: float | None = None  # ε of RMSNorm in blocks; None: LayerNorm
    last_rms_eps: float | None = None  # ε of RMSNorm before the last layer; None: LayerNorm
    # If each stage has its own embedding: their widths, which add up to D.
    widths: tuple[int, ...] = ()
    # Replaces the last stage and the last layer, in half tiers.
    head_stage: HeadStage | None = None


class FastNetwork(BlockNetwork):
    """The network of a packing, computed with `ops`.

    The ops, `captures` and `precomputes_conditioning` are attributes, so that a benchmark can
    replace one of them.
    """

    captures = True
    precomputes_conditioning = True

    def __init__(self, packing: Packing, ops: DirectOps | SplitOps):
        super().__init__()
        self.patch_size = packing.patch_size
        self.in_channels = packing.in_channels
        widths = packing.widths or (len(packing.patches),)
        # With a head stage, the embeddings and the last layer are half precision too, except the
        # first embedding, because its error would pass through all stages.
        half = packing.head_stage is not None
        split = None if ops.splits_outer_layers else False
        self.embeddings = [
            Float32Linear(GemmWeights("the patch embedding", part), split, half and index > 0)
            for index, part in enumerate(packing.patches.split(widths))
        ]
        self.positions = [part.contiguous() for part in packing.position.split(widths, dim=1)]
        self.position = self.positions[0]
        self.stages = packing.stages
        self.head_stage = packing.head_stage
        last = GemmWeights("final_layer", packing.last_weight, packing.last_bias)
        self.last = Float32Linear(last, split, half)
        self.conditioning = packing.conditioning
        if ops.splits_outer_layers:
            self.conditioning.split_large_layers()
        self.ops = ops
        self.dtype = ops.dtype
        self.adaln = partial(ops.adaln, rms_eps=packing.rms_eps)
        self.last_adaln = partial(ops.last_adaln, rms_eps=packing.last_rms_eps)
        self.attention = ops.attention
        self.table: ConditioningTable | None = None  # of the current sampling run

    def embed(self, x: Tensor, tokens: slice = slice(None), copies: int = 1) -> Any:
        """See BlockNetwork.embed. Return a tuple of tensors if each stage has an embedding."""
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
        branches: Branches = ()  # of the previous block; the next adaLN adds them to x
        for stage in self.stages:
            if self.head_stage and stage is self.stages[-1]:
                return self.head_stage.finish(self, x, branches, h, condition, attend, first)
            if branches:
                self.adaln(x, modulation, 0, branches)  # only to add the branches to x
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

        first: position of the first token. Return the branches of the last block, which are not
        added to x yet.
        """
        branches: Branches = ()
        for index, block in enumerate(stage.blocks):
            vectors = BLOCK_VECTORS * index  # index of the block's first vector
            h = self.adaln(x, modulation, vectors, branches)  # (N, t, D)
            a = block.proj(self.attend(stage, block, h, attend, first))  # type: ignore[arg-type]
            attended = (a, vectors + ATTENTION_GATE)
            h = self.adaln(x, modulation, vectors + MLP_SHIFT, (attended,))
            hidden = block.fc1(h)
            if block.activate:
                hidden = block.activate(hidden)
            m = block.fc2(hidden)
            branches = (attended, (m, vectors + MLP_GATE))
        return branches

    def attend(self, stage: Stage, block: Block, h: Tensor, attend: Callable, first: int) -> Tensor:
        """Return attention of a block's queries, keys and values, computed from h (N, t, D)."""
        qkv: Any = block.qkv
        rotates = isinstance(qkv, Linear) and qkv.rotates
        packed = qkv(h, first=first) if rotates else qkv(h)  # (N, t, 3·D)
        if block.rotate:
            packed = block.rotate(packed, first=first)
        return attend(packed, stage.num_heads)

    def prepare(self, times: list[float], labels: list[int], at_once: int = 1) -> RunState:
        if not self.precomputes_conditioning:
            return super().prepare(times, labels, at_once)
        min_entries = len(set(labels)) * at_once
        if self.table is None or self.table.capacity < min_entries:
            self.graphs.clear()  # they read the old table
            self.table = None  # free its memory first
            self.table = ConditioningTable(self.conditioning, min_entries=min_entries)
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
                for layer in block.gemms:
                    yield from layer.parameters()
                if block.rotation is not None:
                    yield from filter(torch.is_tensor, block.rotation)

    def tune(self, row_tokens: Iterable[int]) -> None:
        gemms = []
        for m in sorted(set(row_tokens)):
            rows = m // len(self.position)
            layers = [(layer, m) for layer in self.conditioning.gemms]
            for stage in self.stages:
                tokens = m + rows * stage.prepended
                layers += [(layer, tokens) for layer in stage.blocks[0].gemms]
            tuned = [layer.shape(tokens) for layer, tokens in layers if layer.backend == "tuned"]
            gemms += [(*shape, self.dtype, self.ops.device) for shape in tuned]
        if self.ops.tuner is None or not gemms:
            return
        before = len(self.ops.tuner.seconds)
        self.ops.tuner.share_choices(gemms)
        seconds = self.ops.tuner.seconds[before:]
        if seconds:
            log.warning(
                f"GEMMs measured for this GPU: {len(seconds)} in {sum(seconds):.1f} s; "
                "later runs find what was chosen"
            )
