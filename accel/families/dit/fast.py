"""Lay out DiT's weights for the accelerated network."""

from collections.abc import Callable

import torch.nn as nn

from accel.fast.conditioning import Conditioning
from accel.fast.network import Layout
from accel.fast.ops import Block, Half, Split
from accel.fast.reader import Reader


def block(read: Reader, name: str, ops: Half | Split) -> Block:
    """Lay out the block `name`."""

    def outputs(layer, matrices=1):
        return tuple(
            read.rows(f"{layer}.{kind}", ops.dtype, matrices) for kind in ("weight", "bias")
        )

    def inputs(layer):
        return read.columns(f"{layer}.weight", ops.dtype), read.once(f"{layer}.bias", ops.dtype)

    qkv, proj, fc1, fc2 = (
        f"{name}.{layer}" for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    )
    return ops.block(
        {qkv: outputs(qkv, matrices=3), proj: inputs(proj), fc1: outputs(fc1), fc2: inputs(fc2)}
    )


def lay_out(
    read: Reader, model: nn.Module, ops: Half | Split, block: Callable[..., Block] = block
) -> Layout:
    """Lay out a DiT's state dict. model: gives the number of heads and the timestep
    embedding. block: lays out the blocks of a family that has others.
    """
    kernel = read("x_embedder.proj.weight")  # (D, C, p, p)
    blocks = [f"blocks.{i}" for i in range(read.depth("attn.qkv.weight"))]
    projections = [f"{name}.adaLN_modulation.1" for name in (*blocks, "final_layer")]
    return Layout(
        patch_size=kernel.shape[-1],
        in_channels=kernel.shape[1],
        num_heads=model.num_heads,
        patches=kernel.flatten(1),
        position=read("pos_embed")[0] + read("x_embedder.proj.bias"),
        blocks=[block(read, name, ops) for name in blocks],
        final=(read("final_layer.linear.weight"), read("final_layer.linear.bias")),
        conditioning=Conditioning(read, projections, model.t_embedder.timestep_embedding),
    )
