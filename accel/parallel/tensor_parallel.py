"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053, section 3): for networks that do not fit in one GPU.

A plain network by DTensor: qkv and fc1 column-wise, proj and fc2 row-wise, so that a block sums its partial results
twice (all-reduce of N·T·D each); adaLN's projection, a third of a DiT's weights, column-wise, its few vectors gathered.
A rank has whole heads. It is not fast: a layer sends 4·N·T·D·(s−1)/s elements a rank. Dividing tokens sends a fraction
of that, and dividing batch rows nothing.

Another family adds its entry to DIVISIONS. Accelerated networks divide their own GEMMs in the same way, and keep the
conditioning whole.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate

from accel.network import Network, PlainDiT, PlainLargeDiT


class Division(NamedTuple):
    """How the blocks of `network.model` are divided; names are of submodules of a block."""

    layers: dict[str, ParallelStyle]
    packed: dict[str, int]  # layers whose output is so many matrices of heads side by side
    heads: tuple[str, ...]  # attributes that count them
    norms: tuple[str, ...] = ()  # over all heads, of layers whose output is gathered


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
        heads=("attn.num_heads",),
    ),
    PlainLargeDiT: Division(
        layers={
            "attention.wq": ColwiseParallel(output_layouts=Replicate()),
            "attention.wk": ColwiseParallel(output_layouts=Replicate()),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(),
            "adaLN_modulation.1": ColwiseParallel(output_layouts=Replicate()),
        },
        packed={},
        heads=("attention.n_heads", "attention.n_kv_heads"),
        norms=("attention.q_norm", "attention.k_norm"),
    ),
}


class OwnHeads(torch.nn.Module):
    """A norm over all heads, x (…, D), of which a rank keeps its own (…, D/s)."""

    def __init__(self, norm: torch.nn.Module, mesh: DeviceMesh):
        super().__init__()
        self.norm, self.mesh = norm, mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).chunk(self.mesh.size(), -1)[self.mesh.get_local_rank()]


def divide_weights(network: Network, mesh: DeviceMesh) -> Network:
    """Divide the blocks of a network over the ranks of a one-dimensional mesh, in place; returns it.

    Every rank has the same weights before. Those of a plain network may lie in their file; its part becomes float32 on
    its device. Heads and hidden width must divide.
    """
    ranks = mesh.size()
    if type(network) not in DIVISIONS:
        network.divide(mesh.get_local_rank(), ranks, partial(dist.all_reduce, group=mesh.get_group()))
        return network
    division = DIVISIONS[type(network)]
    for block in network.blocks:
        for path in division.heads:
            module, _, count = path.rpartition(".")
            setattr(block.get_submodule(module), count, getattr(block.get_submodule(module), count) // ranks)
        for name in division.norms:
            block.set_submodule(name, OwnHeads(block.get_submodule(name), mesh))
        for name, matrices in division.packed.items():
            layer = block.get_submodule(name)
            for kind, tensor in list(layer.named_parameters()):
                # q, k, v, each head-major → a rank's heads of q, k and v side by side: its part of the columns.
                parts = tensor.detach().unflatten(0, (matrices, ranks, -1)).transpose(0, 1).flatten(0, 2)
                setattr(layer, kind, torch.nn.Parameter(parts, requires_grad=False))
        parallelize_module(block, mesh, division.layers, src_data_rank=None)  # None: cut what is here, send nothing
    network.model.to(mesh.device_type, torch.float32)
    return network
