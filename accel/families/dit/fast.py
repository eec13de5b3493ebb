"""Pack DiT's weights for the accelerated network."""

from collections.abc import Callable

from accel.families.dit.network import DiT
from accel.fast.conditioning import Conditioning
from accel.fast.network import Packing
from accel.fast.ops import Block, Gemms, Half, Split, Weights
from accel.fast.reader import Reader
from accel.network import Stage


def block(read: Reader, name: str, ops: Half | Split) -> Block:
    """Pack the block `name`."""

    def outputs(layer, matrices=1):
        """Divide the outputs of a GEMM among the ranks."""
        weight = read.rows(f"{layer}.weight", ops.dtype, matrices)
        bias = read.rows(f"{layer}.bias", ops.dtype, matrices)
        return Weights(layer, weight, bias)

    def inputs(layer):
        """Divide the inputs of a GEMM among the ranks, which sum its results."""
        weight = read.columns(f"{layer}.weight", ops.dtype)
        bias = read.once(f"{layer}.bias", ops.dtype)
        return Weights(layer, weight, bias)

    return ops.block(
        Gemms(
            qkv=outputs(f"{name}.attn.qkv", matrices=3),
            proj=inputs(f"{name}.attn.proj"),
            fc1=outputs(f"{name}.mlp.fc1"),
            fc2=inputs(f"{name}.mlp.fc2"),
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
