"""adaLN in plain torch."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6
Branches = tuple[tuple[Tensor, int], ...]  # (branch (N, T, D), index of its gate)


class Modulation(NamedTuple):
    """A table of shift, scale and gate vectors, and the entry of each sample or token.

    A sample's vectors are ``table[entry[sample], vector]``, a token's
    ``table[entry[sample, token], vector]``.
    """

    table: Tensor  # (E, V, D): entries, vectors, width; an entry is contiguous
    entry: Tensor  # (N,) or (N, T) int64, on the table's device; (N, T) is contiguous


def adaln(
    x: Tensor, modulation: Modulation, shift: int, branches: Branches, rms_eps: float | None
) -> Tensor:
    """Compute accel.kernels.adaln.adaln in x's dtype."""

    def vector(index):
        vectors = modulation.table[modulation.entry, index].to(x.dtype)  # (N, D) or (N, T, D)
        return vectors if vectors.ndim == 3 else vectors.unsqueeze(1)

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
