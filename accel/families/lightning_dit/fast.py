"""Pack LightningDiT's weights for the accelerated network: DiT's block with Large-DiT's kernels.

The norms' weights are folded into the projections of the scales.
"""

from functools import partial

import torch
from torch import Tensor

from accel.families.blocks import EPS, grid_rotation_table
from accel.families.large_dit.fast import fold_norms
from accel.families.lightning_dit.network import LightningDiT
from accel.families.sit import fast as sit
from accel.fast.network import Packing
from accel.fast.ops import Block, BlockGemms, DirectOps, Rotation, SplitOps
from accel.fast.reader import Reader

# The hidden width is padded with zeros to a multiple that GEMM kernels need. They add nothing:
# silu(0)·0 = 0.
ALIGNMENT = 64
LAST_NORM = "final_layer.norm_final"


def pack(read: Reader, model: LightningDiT, ops: DirectOps | SplitOps) -> Packing:
    """Pack a LightningDiT's state dict.

    model: for heads, channels, grid and the timestep embedding.
    """
    side = model.x_embedder.grid_size[0]
    head_dim = model.pos_embed.shape[-1] // model.num_heads
    rotation = grid_rotation_table(head_dim, side, ops.stream, ops.device)
    packing = sit.pack(read, model, ops, partial(block, heads=model.num_heads, rotation=rotation))
    norms = norms_of(read.blocks("attn.qkv.weight"))
    fold_norms(read, [*norms, LAST_NORM], packing.conditioning)
    return packing._replace(rms_eps=EPS, last_rms_eps=EPS)


def norms_of(blocks: list[str]) -> list[str]:
    """Return the names of the norms of blocks."""
    return [f"{name}.{norm}" for name in blocks for norm in ("norm1", "norm2")]


def block(
    read: Reader,
    name: str,
    ops: DirectOps | SplitOps,
    heads: int,
    rotation: Tensor,
    **options: bool,
) -> Block:
    """Pack the block `name`. rotation: the table (T, d/2, 2). options: of `ops.block`."""
    fc1 = read.layer(f"{name}.mlp.w12", ops.dtype)  # (2·F, D)
    fc2 = read.layer(f"{name}.mlp.w3", ops.dtype)  # (D, F)
    gemms = BlockGemms(
        qkv=read.layer(f"{name}.attn.qkv", ops.dtype),
        proj=read.layer(f"{name}.attn.proj", ops.dtype),
        fc1=fc1._replace(
            weight=_padded(fc1.weight.unflatten(0, (2, -1))).flatten(0, 1),
            bias=_padded(fc1.bias.unflatten(0, (2, -1))).flatten(),  # type: ignore[union-attr]
        ),
        fc2=fc2._replace(weight=_padded(fc2.weight)),
    )
    norms = _norms(read, f"{name}.attn", heads)
    return ops.block(gemms, gated=True, rotation=Rotation(rotation, norms, EPS), **options)


def _padded(x):
    """Pad dimension 1 of x with zeros up to a multiple of ALIGNMENT."""
    missing = -x.shape[1] % ALIGNMENT
    return torch.cat([x, x.new_zeros(len(x), missing, *x.shape[2:])], dim=1)


def _norms(read, attention, heads):
    """Return weight and bias of the norms of queries and keys, (2, 2, D); None without qk-norm.

    The weight is repeated for all heads, and the bias is zeros.
    """
    if f"{attention}.q_norm.weight" not in read:
        return None
    names = f"{attention}.q_norm.weight", f"{attention}.k_norm.weight"
    weights = torch.stack([read(name).repeat(heads) for name in names])  # (2, D)
    return torch.stack([weights, torch.zeros_like(weights)], dim=1)
