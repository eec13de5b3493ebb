"""A state dict as one rank reads it: of a GEMM its part alone, from the mapped file
straight to the device.
"""

import torch
from torch import Tensor

from accel.network import Part


class Reader:
    """Copies of a state dict's tensors on `device`, which later training does not change.

    stream: the dtype of all that is not a GEMM's.
    """

    def __init__(
        self, state: dict[str, Tensor], device: torch.device, stream: torch.dtype, part: Part
    ):
        self._state = {name: value.detach() for name, value in state.items()}
        self._read = set()
        self.device = device
        self.stream = stream
        self.part = part

    def depth(self, layer: str) -> int:
        """Count the blocks: tensors whose name ends with `layer`."""
        return sum(name.endswith(f".{layer}") for name in self._state)

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""
        return name in self._state

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor, without reading it."""
        return self._state[name].shape

    def mapped(self, name: str) -> Tensor:
        """Return a tensor as it lies in the state dict, not copied."""
        self._read.add(name)
        return self._state[name]

    def require_all(self) -> None:
        """Raise ValueError if a tensor was not read: the network would ignore it."""
        unread = sorted(self._state.keys() - self._read)
        if unread:
            count = f" ({len(unread)} tensors)" if len(unread) > 1 else ""
            raise ValueError(
                f"{unread[0]} is not read by the layout of the accelerated network{count}; use "
                "`precision=fp32` or tf32, and correct the family's fast.py"
            )

    def __call__(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return the whole tensor, in `dtype` or the stream's."""
        return self._copy(self.mapped(name), dtype)

    def rows(self, name: str, dtype: torch.dtype, matrices: int = 1) -> Tensor:
        """Return this rank's outputs of a GEMM: its part of the rows of each of
        `matrices` stacked matrices, or of their bias.
        """
        parts = self.mapped(name).unflatten(0, (matrices, self.part.ranks, -1))
        return self._copy(parts[:, self.part.rank], dtype).flatten(0, 1)

    def columns(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return this rank's inputs of a GEMM (N, K): its part of the columns, (N, K / ranks)."""
        parts = self.mapped(name).unflatten(1, (self.part.ranks, -1))
        return self._copy(parts[:, self.part.rank], dtype)

    def once(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the bias of a GEMM whose results the ranks sum: on the first rank, zeros
        on the others.
        """
        bias = self(name, dtype)
        return bias if self.part.rank == 0 else torch.zeros_like(bias)

    def heads(self, name: str, heads: int, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return this rank's query heads, of `heads` of `size` rows; several may share a
        head of keys or values.
        """
        whole = self.mapped(name).unflatten(0, (-1, size))
        mine = heads // self.part.ranks
        shared = heads // len(whole)
        first = mine * self.part.rank
        # (kv heads, d, …)
        rows = self._copy(whole[first // shared : (first + mine - 1) // shared + 1], dtype)
        if shared > 1:
            rows = rows.repeat_interleave(shared, dim=0)[first % shared :][:mine]
        return rows.flatten(0, 1)

    def _copy(self, tensor, dtype):
        # First to the device, which converts faster.
        on_device = tensor.to(self.device)
        return on_device.to(dtype or self.stream, copy=True, memory_format=torch.contiguous_format)
