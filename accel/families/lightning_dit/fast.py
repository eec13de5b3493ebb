"""Lay out LightningDiT's weights for the accelerated network: DiT's block with
Large-DiT's kernels. The norms' weights are folded into the projections of the scales.
"""

from functools import partial

import torch
import torch.nn as nn
from torch import Tensor

from accel.families.lightning_dit.network import EPS, rotation_table
from accel.families.sit import fast as sit
from accel.fast.network import Layout
from accel.fast.ops import Block, Half, Rotation, Split
from accel.fast.reader import Reader

# the hidden width is padded with zeros to a multiple of it, as the GEMM kernels require
ALIGNED = 64


def lay_out(read: Reader, model: nn.Module, ops: Half | Split) -> Layout:
    """Lay out a LightningDiT's state dict. model: gives heads, channels, grid and the
    timestep embedding.
    """
    head = read.shape("pos_embed")[2] // model.num_heads
    side = model.x_embedder.grid_size[0]
    rotation = rotation_table(head, side, ops.stream, ops.device)
    layout = sit.lay_out(
        read, model, ops, partial(_block, heads=model.num_heads, rotation=rotation)
    )
    norms = [f"blocks.{i}.{norm}" for i in range(len(layout.blocks)) for norm in ("norm1", "norm2")]
    for i, norm in enumerate((*norms, "final_layer.norm_final")):
        layout.conditioning.fold(3 * i + 1, read(f"{norm}.weight"))
    return layout._replace(rms_eps=EPS, last_rms_eps=EPS)


def _block(read: Reader, name: str, ops: Half | Split, heads: int, rotation: Tensor) -> Block:
    qkv, proj, w12, w3 = (
        f"{name}.{layer}" for layer in ("attn.qkv", "attn.proj", "mlp.w12", "mlp.w3")
    )
    both = (
        read.rows(f"{w12}.{kind}", ops.dtype, matrices=2).unflatten(0, (2, -1))
        for kind in ("weight", "bias")
    )
    gemms = {
        qkv: tuple(
            read.rows(f"{qkv}.{kind}", ops.dtype, matrices=3) for kind in ("weight", "bias")
        ),
        proj: (read.columns(f"{proj}.weight", ops.dtype), read.once(f"{proj}.bias", ops.dtype)),
        w12: tuple(_filled_up(value).flatten(0, 1) for value in both),  # (2·F, D), (2·F,)
        w3: (
            _filled_up(read.columns(f"{w3}.weight", ops.dtype)),
            read.once(f"{w3}.bias", ops.dtype),
        ),
    }
    norms = _norms(read, f"{name}.attn", heads // ops.part.ranks)
    return ops.block(gemms, gated=True, rotation=Rotation(rotation, norms, EPS))


def _filled_up(value: Tensor) -> Tensor:
    """Pad dimension 1 with zeros to a multiple of ALIGNED. They add nothing: silu(0)·0 = 0."""
    n, width, *others = value.shape
    return torch.cat([value, value.new_zeros(n, -width % ALIGNED, *others)], dim=1)


def _norms(read, attention, heads):
    """Return weight and zero bias of the norm of queries, then of keys, repeated for all
    heads, (2, 2, D); None without qk-norm.
    """
    if not read.has(f"{attention}.q_norm.weight"):
        return None
    weights = torch.stack(
        [read(f"{attention}.{norm}.weight").repeat(heads) for norm in ("q_norm", "k_norm")]
    )
    return torch.stack([weights, torch.zeros_like(weights)], dim=1)
