"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053, section 3): for networks that do not fit in one GPU.

A plain network by DTensor: qkv and fc1 column-wise, proj and fc2 row-wise, so that a block sums its partial results twice (all-reduce
of N·T·D each); adaLN's projection, a third of a DiT's weights, column-wise, its few vectors gathered. A rank has whole
heads. It is not fast: a layer sends 4·N·T·D·(s−1)/s elements a rank. Dividing tokens sends a fraction of that, and
dividing batch rows nothing.

A second family of networks adds its entry to DIVISIONS. Accelerated networks divide their own GEMMs in the same way,
and keep the conditioning whole.
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
    norms: tuple[str, ...] = ()  # LayerNorms over a width that is divided, if the network has them


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
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
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


class DividedLayerNorm(torch.nn.Module):
    """A LayerNorm whose width the ranks of `mesh` divide: x (…, D/s) → (…, D/s), with the statistics of all D."""

    def __init__(self, norm: torch.nn.LayerNorm, mesh: DeviceMesh):
        super().__init__()
        self.eps, self.mesh = norm.eps, mesh
        for kind, tensor in norm.named_parameters():
            part = tensor.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            setattr(self, kind, torch.nn.Parameter(part, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - _average(x.mean(-1, keepdim=True), self.mesh)
        variance = _average(centred.square().mean(-1, keepdim=True), self.mesh)
        return centred * torch.rsqrt(variance + self.eps) * self.weight + self.bias


def _sum(x, mesh):
    dist.all_reduce(x, group=mesh.get_group())


def _average(x, mesh):
    _sum(x, mesh)
    return x / mesh.size()


def divide_weights(network: Network, mesh: DeviceMesh) -> Network:
    """Divide the blocks of a network over the ranks of a one-dimensional mesh, in place; returns it.

    Every rank has the same weights before. Those of a plain network may lie on the CPU; only its part goes to its
    device. Heads and hidden width must divide.
    """
    ranks = mesh.size()
    if type(network) not in DIVISIONS:
        network.divide(mesh.get_local_rank(), ranks, partial(_sum, mesh=mesh))
        return network
    division = DIVISIONS[type(network)]
    for block in network.blocks:
        for path in division.heads:
            module, _, count = path.rpartition(".")
            setattr(block.get_submodule(module), count, getattr(block.get_submodule(module), count) // ranks)
        for name in division.norms:
            if isinstance(norm := block.get_submodule(name), torch.nn.LayerNorm):
                block.set_submodule(name, DividedLayerNorm(norm, mesh))
        for name, matrices in division.packed.items():
            layer = block.get_submodule(name)
            for kind, tensor in list(layer.named_parameters()):
                # q, k, v, each head-major → a rank's heads of q, k and v side by side: its part of the columns.
                parts = tensor.detach().unflatten(0, (matrices, ranks, -1)).transpose(0, 1).flatten(0, 2)
                setattr(layer, kind, torch.nn.Parameter(parts, requires_grad=False))
        parallelize_module(block, mesh, division.layers, src_data_rank=None)  # None: cut what is here, send nothing
    network.model.to(mesh.device_type)
    return network
