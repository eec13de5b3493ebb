"""Lay out LightningDiT's weights for the accelerated network: DiT's block with Large-DiT's kernels. The norms' weights
are folded into the projections of the scales."""

import torch
import torch.nn as nn
from torch import Tensor

from accel.families.lightning_dit.network import EPS, rotation_table
from accel.fast.conditioning import Conditioning
from accel.fast.network import Layout
from accel.fast.ops import Block, Half, Split
from accel.fast.reader import Reader

ALIGNED = 64  # the hidden width is padded with zeros to a multiple of it, as the GEMM kernels require


def lay_out(read: Reader, model: nn.Module, ops: Half | Split) -> Layout:
    """Lay out a LightningDiT's state dict. model: gives heads, channels and the timestep embedding."""
    kernel, position = read("x_embedder.proj.weight"), read("pos_embed")[0]  # (D, C, p, p), (T, D)
    blocks = [f"blocks.{i}" for i in range(read.depth("attn.qkv.weight"))]
    projections = [f"{name}.adaLN_modulation.1" for name in (*blocks, "final_layer")]
    conditioning = Conditioning(read, projections, model.t_embedder.timestep_embedding)
    norms = [f"{name}.{norm}" for name in blocks for norm in ("norm1", "norm2")]
    for i, norm in enumerate((*norms, "final_layer.norm_final")):
        conditioning.fold(3 * i + 1, read(f"{norm}.weight"))
    side = round(len(position) ** 0.5)
    rotation = rotation_table(len(kernel) // model.num_heads, side, ops.stream, ops.device)
    # (p·p·C', …): the channels of a learned sigma are not computed.
    final = (read(f"final_layer.linear.{kind}").unflatten(0, (-1, model.out_channels)) for kind in ("weight", "bias"))
    return Layout(
        patch_size=kernel.shape[-1],
        in_channels=kernel.shape[1],
        num_heads=model.num_heads,
        patches=kernel.flatten(1),
        position=position + read("x_embedder.proj.bias"),
        blocks=[_block(read, name, model.num_heads, rotation, ops) for name in blocks],
        final=tuple(value[:, : model.in_channels].flatten(0, 1) for value in final),
        conditioning=conditioning,
        rms_eps=EPS,
        last_rms_eps=EPS,
    )


def _block(read: Reader, name: str, heads: int, rotation: Tensor, ops: Half | Split) -> Block:
    qkv, proj, w12, w3 = (f"{name}.{layer}" for layer in ("attn.qkv", "attn.proj", "mlp.w12", "mlp.w3"))
    both = (read.rows(f"{w12}.{kind}", ops.dtype, matrices=2).unflatten(0, (2, -1)) for kind in ("weight", "bias"))
    gemms = {
        qkv: tuple(read.rows(f"{qkv}.{kind}", ops.dtype, matrices=3) for kind in ("weight", "bias")),
        proj: (read.columns(f"{proj}.weight", ops.dtype), read.once(f"{proj}.bias", ops.dtype)),
        w12: tuple(_filled_up(value).flatten(0, 1) for value in both),  # (2·F, D), (2·F,)
        w3: (_filled_up(read.columns(f"{w3}.weight", ops.dtype)), read.once(f"{w3}.bias", ops.dtype)),
    }
    return ops.block(gemms, True, rotation, _norms(read, f"{name}.attn", heads // ops.part.ranks), EPS)


def _filled_up(value: Tensor) -> Tensor:
    """Pad dimension 1 with zeros to a multiple of ALIGNED. They add nothing: silu(0)·0 = 0."""
    n, width, *others = value.shape
    return torch.cat([value, value.new_zeros(n, -width % ALIGNED, *others)], dim=1)


def _norms(read, attention, heads):
    """Return weight and zero bias of the norm of queries, then of keys, repeated for all heads, (2, 2, D); None without
    qk-norm."""
    if f"{attention}.q_norm.weight" not in read.state:
        return None
    weights = torch.stack([read(f"{attention}.{norm}.weight").repeat(heads) for norm in ("q_norm", "k_norm")])
    return torch.stack([weights, torch.zeros_like(weights)], dim=1)
