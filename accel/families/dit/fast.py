"""Pack DiT's weights for the accelerated network."""

from collections.abc import Callable

from accel.families.dit.network import DiT
from accel.fast.conditioning import Conditioning
from accel.fast.network import Packing
from accel.fast.ops import Block, Gemms, Half, Split, Weights
from accel.fast.reader import Reader
from accel.network import Stage


def outputs(
    read: Reader, layer: str, ops: Half | Split, matrices: int = 1, multiple: int = 1
) -> Weights:
    """Divide the outputs of a GEMM among the ranks. Other arguments: as for Reader.rows."""
    weight = read.rows(f"{layer}.weight", ops.dtype, matrices, multiple)
    bias = read.rows(f"{layer}.bias", ops.dtype, matrices, multiple)
    return Weights(layer, weight, bias)


def inputs(read: Reader, layer: str, ops: Half | Split, multiple: int = 1) -> Weights:
    """Divide the inputs of a GEMM among the ranks, which sum its results."""
    weight = read.columns(f"{layer}.weight", ops.dtype, multiple)
    return Weights(layer, weight, read.once(f"{layer}.bias", ops.dtype))


def block(read: Reader, name: str, ops: Half | Split) -> Block:
    """Pack the block `name`."""
    return ops.block(
        Gemms(
            qkv=outputs(read, f"{name}.attn.qkv", ops, matrices=3),
            proj=inputs(read, f"{name}.attn.proj", ops),
            fc1=outputs(read, f"{name}.mlp.fc1", ops),
            fc2=inputs(read, f"{name}.mlp.fc2", ops),
        )
    )


def pack(
    read: Reader,
    model: DiT,
    ops: Half | Split,
    block: Callable[[Reader, str, Half | Split], Block] = block,
) -> Packing:
    """Pack a DiT's state dict.

    model: gives the number of heads and the timestep embedding. block: packs the blocks of a
    family that has others.
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
                num_heads=model.num_heads // ops.part.ranks,
            )
        ],
        last_weight=read("final_layer.linear.weight"),
        last_bias=read("final_layer.linear.bias"),
        conditioning=Conditioning(read, projections, model.t_embedder.timestep_embedding),
    )
