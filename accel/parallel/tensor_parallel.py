"""A reference model whose weights ranks divide (Shoeybi et al. 2019, arXiv:1909.08053, section 3), by DTensor.

qkv and fc1 column-wise, proj and fc2 row-wise, so that a block sums its partial results twice (all-reduce of N·T·D
each); adaLN's projection, a third of a DiT's weights, column-wise, its few vectors gathered. A rank has whole heads. It
is for networks that do not fit in one GPU, and not fast: a layer sends 4·N·T·D·(s−1)/s elements a rank. Dividing tokens
sends a fraction of that, and dividing batch rows nothing.

Accelerated networks are read in parts (accel/fast/reader.py).
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate

from accel.network import family_module


class OwnHeads(torch.nn.Module):
    """A norm over all heads, x (…, D), of which a rank keeps its own (…, D/s)."""

    def __init__(self, norm: torch.nn.Module, mesh: DeviceMesh):
        super().__init__()
        self.norm, self.mesh = norm, mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).chunk(self.mesh.size(), -1)[self.mesh.get_local_rank()]


def divide_weights(model: torch.nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Divide the blocks of a model over the ranks of `group`, in place, as its family's division.py says.

    Every rank has the same weights before; they may lie in their file. This rank's part becomes float32 on `device`.
    Heads and hidden width must divide.
    """
    division = family_module(model, "division", "`parallel=weights`: use rows or tokens")
    mesh = DeviceMesh.from_group(group, device.type)
    ranks, gathered = mesh.size(), dict(output_layouts=Replicate())
    styles = dict.fromkeys(division.COLUMNS, ColwiseParallel()) | dict.fromkeys(division.ROWS, RowwiseParallel())
    styles |= dict.fromkeys(division.GATHERED, ColwiseParallel(**gathered))
    for block in model.blocks:
        for path in division.HEADS:
            module, _, count = path.rpartition(".")
            setattr(block.get_submodule(module), count, getattr(block.get_submodule(module), count) // ranks)
        for name in division.NORMS:
            block.set_submodule(name, OwnHeads(block.get_submodule(name), mesh))
        for name, matrices in division.PACKED.items():
            layer = block.get_submodule(name)
            for kind, tensor in list(layer.named_parameters()):
                # q, k, v, each head-major → a rank's heads of q, k and v side by side: its part of the columns.
                parts = tensor.detach().unflatten(0, (matrices, ranks, -1)).transpose(0, 1).flatten(0, 2)
                setattr(layer, kind, torch.nn.Parameter(parts, requires_grad=False))
        parallelize_module(block, mesh, styles, src_data_rank=None)  # None: cut what is here, send nothing
    model.to(device, torch.float32)
