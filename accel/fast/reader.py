"""Reader of a state dict, for the packing functions of families."""

import torch
from torch import Tensor

from accel.fast.ops import GemmWeights


class Reader:
    """Returns copies of a state dict's tensors on `device`, and records which were read.

    They are always copies, so that later training does not change them. stream: the default dtype.
    """

    def __init__(
        self,
        state: dict[str, Tensor],
        device: torch.device,
        stream: torch.dtype,
    ):
        self.device = device
        self.stream = stream
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
        """Return a tensor of the state dict, not copied."""
        self._unread.pop(name, None)
        return self._state[name]

    def __call__(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of a tensor, by default in the stream's dtype."""
        # Move it first: the device converts faster.
        on_device = self.original(name).to(self.device)
        return on_device.to(
            dtype or self.stream,
            copy=True,
            memory_format=torch.contiguous_format,
        )

    def layer(self, name: str, dtype: torch.dtype) -> GemmWeights:
        """Return a layer's weight and bias."""
        return GemmWeights(name, self(f"{name}.weight", dtype), self(f"{name}.bias", dtype))

    def require_all_read(self) -> None:
        """Raise ValueError, naming one of the tensors, if some were not read."""
        if self._unread:
            raise ValueError(
                f"the accelerated network does not use {len(self._unread)} of the tensors, such as "
                f"{min(self._unread)}; use `precision=fp32`"
            )
