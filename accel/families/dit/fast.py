"""Pack DiT's weights for the accelerated network."""

from collections.abc import Callable

from accel.families.dit.network import PatchTransformer
from accel.fast.conditioning import Conditioning
from accel.fast.network import Packing
from accel.fast.ops import Block, BlockGemms, DirectOps, SplitOps
from accel.fast.reader import Reader
from accel.runtime.stages import Stage


def block(read: Reader, name: str, ops: DirectOps | SplitOps) -> Block:
    """Pack the block `name`."""
    return ops.block(
        BlockGemms(
            qkv=read.layer(f"{name}.attn.qkv", ops.dtype),
            proj=read.layer(f"{name}.attn.proj", ops.dtype),
            fc1=read.layer(f"{name}.mlp.fc1", ops.dtype),
            fc2=read.layer(f"{name}.mlp.fc2", ops.dtype),
        )
    )


def pack(
    read: Reader,
    model: PatchTransformer,
    ops: DirectOps | SplitOps,
    block: Callable[[Reader, str, DirectOps | SplitOps], Block] = block,
) -> Packing:
    """Pack a DiT's state dict.

    model: for the number of heads and the timestep embedding. block: packs a block; a family with
    other blocks passes its own function.
    """
    kernel = read("x_embedder.proj.weight")  # (D, C, p, p)
    names = read.blocks("attn.qkv.weight")
    projections = [f"{name}.adaLN_modulation.1" for name in (*names, "final_layer")]
    return Packing(
        patch_size=kernel.shape[-1],
        in_channels=kernel.shape[1],
        patches=kernel.flatten(1),
        position=read("pos_embed")[0] + read("x_embedder.proj.bias"),
        stages=[
            Stage(
                blocks=[block(read, name, ops) for name in names],
                width=len(kernel),
                num_heads=model.num_heads,
            )
        ],
        last_weight=read("final_layer.linear.weight"),
        last_bias=read("final_layer.linear.bias"),
        conditioning=Conditioning(read, projections, model.t_embedder.timestep_embedding),
    )
