"""adaLN in plain torch."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6
Branches = tuple[tuple[Tensor, int], ...]  # (branch (N, T, D), index of its gate)


class Modulation(NamedTuple):
    """A table of shift, scale and gate vectors, and each sample's entry.

    A sample's vectors are ``table[entry[sample], vector]``.
    """

    table: Tensor  # (E, V, D): pairs of timestep and label, vectors, width; an entry is contiguous
    entry: Tensor  # (N,) int64, on the table's device


def adaln(
    x: Tensor, modulation: Modulation, shift: int, branches: Branches, rms_eps: float | None
) -> Tensor:
    """Compute accel.kernels.adaln.adaln in x's dtype."""

    def vector(index):
        return modulation.table[modulation.entry, index].unsqueeze(1)  # (N, 1, D)

    total = x
    for branch, gate in branches:
        total = torch.addcmul(total, vector(gate), branch.to(x.dtype))
    if len(branches) == 2:
        x.copy_(total)
    width = total.shape[-1:]
    if rms_eps is None:
        normed = F.layer_norm(total, width, eps=EPS)
    else:
        normed = F.rms_norm(total, width, eps=rms_eps)
    return torch.addcmul(vector(shift), normed, 1 + vector(shift + 1))
