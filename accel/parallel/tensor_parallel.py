"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053, section 3): for networks that do not fit in one GPU.

By DTensor: qkv and fc1 column-wise, proj and fc2 row-wise, so that a block sums its partial results twice (all-reduce
of N·T·D each); adaLN's projection, a third of a DiT's weights, column-wise, its few vectors gathered. A rank has whole
heads. It is not fast: a layer sends 4·N·T·D·(s−1)/s elements a rank. Dividing tokens sends a fraction of that, and
dividing batch rows nothing.

A second family of networks adds its entry to DIVISIONS.
"""

from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate

from accel.network import Network, PlainDiT


class Division(NamedTuple):
    """How the blocks of `network.model` are divided; names are of submodules of a block."""

    layers: dict[str, ParallelStyle]
    packed: dict[str, int]  # layers whose output is so many matrices of heads side by side
    heads: str  # the module that counts them as num_heads


DIVISIONS = {
    PlainDiT: Division(
        layers={
            "attn.qkv": ColwiseParallel(),
            "attn.proj": RowwiseParallel(),
            "mlp.fc1": ColwiseParallel(),
            "mlp.fc2": RowwiseParallel(),
            "adaLN_modulation.1": ColwiseParallel(output_layouts=Replicate()),
        },
        packed={"attn.qkv": 3},
        heads="attn",
    ),
}


def divide_weights(network: Network, mesh: DeviceMesh) -> Network:
    """Divide the blocks of a plain network over the ranks of a one-dimensional mesh, in place; returns it.

    Every rank has the same weights before, which may lie on the CPU; only its part goes to its device. Heads and hidden
    width must divide.
    """
    division, ranks = DIVISIONS[type(network)], mesh.size()
    for block in network.model.blocks:
        block.get_submodule(division.heads).num_heads //= ranks
        for name, matrices in division.packed.items():
            layer = block.get_submodule(name)
            for kind, tensor in list(layer.named_parameters()):
                # q, k, v, each head-major → a rank's heads of q, k and v side by side: its part of the columns.
                parts = tensor.detach().unflatten(0, (matrices, ranks, -1)).transpose(0, 1).flatten(0, 2)
                setattr(layer, kind, torch.nn.Parameter(parts, requires_grad=False))
        parallelize_module(block, mesh, division.layers, src_data_rank=None)  # None: cut what is here, send nothing
    network.model.to(mesh.device_type)
    return network
