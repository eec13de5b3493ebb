"""A state dict as one rank reads it.

Of a GEMM's weight the rank reads its part alone, from the mapped file straight to the device.
"""

import torch
from torch import Tensor

from accel.network import Part

SHOWN = 3  # names in an error


class Reader:
    """Copies of a state dict's tensors on `device`, which later training does not change.

    stream: the dtype of all tensors that are not a GEMM's. The reader notes which tensors were
    read: `require_all_read` refuses a state dict that a packing used in part.
    """

    def __init__(
        self,
        state: dict[str, Tensor],
        device: torch.device,
        stream: torch.dtype,
        part: Part,
    ):
        self.device = device
        self.stream = stream
        self.part = part
        self._state = {name: value.detach() for name, value in state.items()}
        self._unread = dict.fromkeys(state)  # names, in the order of the state dict

    def __contains__(self, name: str) -> bool:
        return name in self._state

    def blocks(self, layer: str) -> list[str]:
        """Return the names of the blocks that have a tensor `layer`, in order."""
        ending = f".{layer}"
        names = [name.removesuffix(ending) for name in self._state if name.endswith(ending)]
        return sorted(names, key=lambda name: int(name.rpartition(".")[2]))

    def original(self, name: str) -> Tensor:
        """Return the tensor of the state dict itself, not copied."""
        self._unread.pop(name, None)
        return self._state[name]

    def __call__(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return the whole tensor, in `dtype` or the stream's."""
        return self._copy(self.original(name), dtype)

    def rows(self, name: str, dtype: torch.dtype, matrices: int = 1, multiple: int = 1) -> Tensor:
        """Return this rank's outputs of a GEMM.

        These are its part of the rows of each of `matrices` stacked matrices, or of their bias.
        Zeros fill all parts up to the same multiple of `multiple`.
        """
        stacked = self.original(name).unflatten(0, (matrices, -1))
        return self._of_rank(stacked, dtype, multiple).flatten(0, 1)

    def columns(self, name: str, dtype: torch.dtype, multiple: int = 1) -> Tensor:
        """Return this rank's inputs of a GEMM (N, K): its part of the columns.

        Zeros fill all parts up to the same multiple of `multiple`.
        """
        return self._of_rank(self.original(name), dtype, multiple)

    def once(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the bias of a GEMM whose results the ranks sum.

        The first rank has the bias, the others zeros.
        """
        bias = self(name, dtype)
        return bias if self.part.rank == 0 else torch.zeros_like(bias)

    def heads(self, name: str, heads: int, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return this rank's query heads, of `heads` heads of `size` rows each.

        Several query heads may share a head of keys or values, which is then repeated.
        """
        whole = self.original(name).unflatten(0, (-1, size))  # (kv heads, d, …)
        count = heads // self.part.ranks
        first = count * self.part.rank
        sharing = heads // len(whole)  # query heads that share a head of keys
        begin = first // sharing
        end = (first + count - 1) // sharing + 1
        rows = self._copy(whole[begin:end], dtype)
        if sharing > 1:
            rows = rows.repeat_interleave(sharing, dim=0)[first % sharing :][:count]
        return rows.flatten(0, 1)

    def require_all_read(self) -> None:
        """Raise ValueError, naming the tensors, if some of the state dict were not read."""
        if not self._unread:
            return
        names = list(self._unread)
        listed = ", ".join(names[:SHOWN])
        if len(names) > SHOWN:
            listed += f" and {len(names) - SHOWN} more"
        raise ValueError(f"the accelerated network does not use {listed}; use `precision=fp32`")

    def _of_rank(self, value, dtype, multiple):
        """Return this rank's part of dimension 1, filled up with zeros."""
        length = value.shape[1]
        share = -(-length // (self.part.ranks * multiple)) * multiple
        first = share * self.part.rank
        part = self._copy(value[:, first : first + share], dtype)
        missing = share - part.shape[1]
        if not missing:
            return part
        zeros = part.new_zeros(len(part), missing, *part.shape[2:])
        return torch.cat([part, zeros], dim=1)

    def _copy(self, tensor, dtype):
        # First to the device, which converts faster.
        on_device = tensor.to(self.device)
        return on_device.to(
            dtype or self.stream,
            copy=True,
            memory_format=torch.contiguous_format,
        )
