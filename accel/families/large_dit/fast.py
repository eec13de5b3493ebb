"""Lay out Large-DiT's weights for the accelerated network. In a block

h ← adaLN(x)                               RMSNorm; its weight is folded into scale's projection
a ← wo(attention(rotated(qkv(h))))         q, k, v by one GEMM; their norm and rotation by one
                                           kernel
m ← w2(silu(w1·h) ∗ w3·h)                  w1 and w3 by one GEMM, SwiGLU by a kernel
"""

import torch
import torch.nn as nn

from accel.families.large_dit.network import rotation_table
from accel.fast.conditioning import Conditioning
from accel.fast.network import Layout
from accel.fast.ops import Block, Half, Rotation, Split
from accel.fast.reader import Reader


def lay_out(read: Reader, model: nn.Module, ops: Half | Split) -> Layout:
    """Lay out a Large-DiT's state dict. model: gives heads, channels, patch and input
    size.

    The conditioning's weights are a tenth of the network or more, so they stay in the
    GEMMs' dtype. Its arithmetic is float32.
    """
    patches = read("x_embedder.weight")
    tokens = (model.input_size // model.patch_size) ** 2  # (D, C·p·p)
    blocks = [f"layers.{i}" for i in range(read.depth("attention.wq.weight"))]
    # (T, d/2, 2)
    rotation = rotation_table(len(patches) // model.n_heads, tokens, ops.stream, ops.device)
    projections = [f"{name}.adaLN_modulation.1" for name in (*blocks, "final_layer")]
    conditioning = Conditioning(read, projections, model.t_embedder.timestep_embedding, ops.dtype)
    for i, name in enumerate(blocks):
        conditioning.fold(6 * i + 1, read(f"{name}.attention_norm.weight"))
        conditioning.fold(6 * i + 4, read(f"{name}.ffn_norm.weight"))
    return Layout(
        patch_size=model.patch_size,
        in_channels=model.in_channels,
        num_heads=model.n_heads,
        patches=patches,
        position=read("x_embedder.bias").expand(tokens, -1).contiguous(),  # (T, D)
        blocks=[_block(read, name, model.n_heads, rotation, ops) for name in blocks],
        final=(read("final_layer.linear.weight"), read("final_layer.linear.bias")),
        conditioning=conditioning,
        rms_eps=model.blocks[0].attention_norm.eps,
    )


def _block(read: Reader, name: str, heads: int, rotation: torch.Tensor, ops: Half | Split) -> Block:
    attention = f"{name}.attention"
    mlp = f"{name}.feed_forward"
    size = 2 * rotation.shape[1]  # of a head
    q, k, v = (
        read.heads(f"{attention}.{layer}.weight", heads, size, ops.dtype)
        for layer in ("wq", "wk", "wv")
    )
    w1, w3 = (read.rows(f"{mlp}.{layer}.weight", ops.dtype) for layer in ("w1", "w3"))
    gemms = {
        f"{attention}.wq, wk, wv": (torch.cat([q, k, v]), None),  # (3·D, D)
        f"{attention}.wo": (read.columns(f"{attention}.wo.weight", ops.dtype), None),
        f"{mlp}.w1, w3": (torch.cat([w1, w3]), None),  # (2·F, D)
        f"{mlp}.w2": (read.columns(f"{mlp}.w2.weight", ops.dtype), None),
    }
    return ops.block(
        gemms, gated=True, rotation=Rotation(rotation, _norms(read, attention, heads, size))
    )


def _norms(read, attention, heads, size):
    """Return weight and bias of the norm of queries, then of keys, (2, 2, D); None
    without qk-norm.
    """
    if not read.has(f"{attention}.q_norm.weight"):
        return None
    pairs = [
        torch.stack(
            [read.heads(f"{attention}.{norm}.{kind}", heads, size) for kind in ("weight", "bias")]
        )
        for norm in ("q_norm", "k_norm")
    ]
    return torch.stack(pairs)
