"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053, section 3): for networks that do not fit in one GPU.

A plain network by DTensor: qkv and fc1 column-wise, proj and fc2 row-wise, so that a block sums its partial results
twice (all-reduce of N·T·D each); adaLN's projection, a third of a DiT's weights, column-wise, its few vectors gathered.
A rank has whole heads. It is not fast: a layer sends 4·N·T·D·(s−1)/s elements a rank. Dividing tokens sends a fraction
of that, and dividing batch rows nothing.

Another family adds its entry to DIVISIONS. Accelerated networks divide their own GEMMs in the same way, and keep the
conditioning whole.
"""

from collections.abc import Callable
from functools import partial, singledispatch
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate

from accel.families.dit.network import DiT
from accel.families.large_dit.network import DiT_Llama
from accel.families.sit.network import SiT
from accel.network import BlockNetwork, Plain


class Division(NamedTuple):
    """How the blocks of a model are divided; names are of submodules of a block."""

    layers: dict[str, ParallelStyle]
    packed: dict[str, int]  # layers whose output is so many matrices of heads side by side
    heads: tuple[str, ...]  # attributes that count them
    norms: tuple[str, ...] = ()  # over all heads, of layers whose output is gathered


DIVISIONS = {
    DiT: Division(
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
    DiT_Llama: Division(
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
DIVISIONS[SiT] = DIVISIONS[DiT]


class OwnHeads(torch.nn.Module):
    """A norm over all heads, x (…, D), of which a rank keeps its own (…, D/s)."""

    def __init__(self, norm: torch.nn.Module, mesh: DeviceMesh):
        super().__init__()
        self.norm, self.mesh = norm, mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).chunk(self.mesh.size(), -1)[self.mesh.get_local_rank()]


@singledispatch
def divide_weights(network: BlockNetwork, mesh: DeviceMesh) -> BlockNetwork:
    """Divide the blocks of a network over the ranks of a one-dimensional mesh, in place; returns it.

    Every rank has the same weights before. Those of a plain network may lie in their file; its part becomes float32 on
    its device. Heads and hidden width must divide.
    """
    _divide_gemms(network, mesh.get_local_rank(), mesh.size(), partial(dist.all_reduce, group=mesh.get_group()))
    return network


@divide_weights.register
def _(network: Plain, mesh: DeviceMesh) -> Plain:
    ranks, model, division = mesh.size(), network.model, DIVISIONS[type(network.model)]
    for block in model.blocks:
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
    model.to(mesh.device_type, torch.float32)
    return network


def _divide_gemms(network, rank, ranks, all_reduce):
    """Keep a rank's part of an accelerated network's GEMMs: its heads, and its part of the hidden width."""

    def own(tensor, matrices):  # its part of the rows of each of `matrices` matrices
        return tensor.unflatten(0, (matrices, ranks, -1))[:, rank].flatten(0, 1).clone()

    def average(x):
        all_reduce(x)
        return x / ranks

    network.num_heads //= ranks
    network.average = average
    network.norms = [norms if norms is None else norms.chunk(ranks, -1)[rank].contiguous() for norms in network.norms]
    for layers in network.blocks:
        for first, second in ((0, 1), (2, 3)):
            inner, outer = layers[first], layers[second]
            matrices = len(inner.weight) // outer.weight.shape[1]  # side by side, such as q, k and v
            inner.weight, inner.bias = own(inner.weight, matrices), own(inner.bias, matrices)
            outer.weight = outer.weight.unflatten(1, (ranks, -1))[:, rank].clone()
            outer.bias = outer.bias if rank == 0 else torch.zeros_like(outer.bias)
            layers[second] = Summed(outer, all_reduce)


class Summed:
    """A layer of whose inner dimension every rank has a part. all_reduce(x): sums x over the ranks, in place."""

    def __init__(self, layer: Callable[[torch.Tensor], torch.Tensor], all_reduce: Callable[[torch.Tensor], object]):
        self.layer, self.all_reduce = layer, all_reduce

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        self.all_reduce(out)
        return out
