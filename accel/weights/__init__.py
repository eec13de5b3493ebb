"""The weights of a network: a name, file, folder or hub id → tensors. One file a layout.
Imports no torch.
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Contents(NamedTuple):
    """The contents of a file or folder: float tensors by name, and the facts beside them."""

    state: "dict[str, Tensor]"
    facts: dict[str, Any]


class Weights(Protocol):
    """The weights of a network. `checkpoint.open_checkpoint` makes them of a file, a folder or
    a hub id, `families.loaded_module.LoadedModule` of a module that the caller holds.

    name: as the user or the class says it. metadata: checked facts beside the tensors, by
    their names in metadata.py. state: float tensors under the names of their family's files;
    not to be written to.
    """

    name: str

    @property
    def metadata(self) -> dict[str, Any]: ...

    @property
    def state(self) -> "dict[str, Tensor]": ...

    def reading(self) -> "AbstractContextManager[dict[str, Tensor]]":
        """Yield `state` for its last use. Raises UsageError if it was changed meanwhile."""

    def digest(self) -> str:
        """Return 16 hex digits of all values that were trained."""
