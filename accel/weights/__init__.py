"""Weights of a network, from a file, a folder, the hub or a module. Knows no family."""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # torch is slow to import
    from torch import Tensor


class Weights(Protocol):
    """The weights of a network: a Checkpoint, or a module that the caller holds.

    name: what the user calls them.
    """

    name: str

    @property
    def state(self) -> "dict[str, Tensor]":
        """Return the tensors under the names of the family's files. Read-only."""

    @property
    def metadata(self) -> dict[str, Any]:
        """Return the facts that come with the tensors."""

    def digest(self) -> str:
        """Return 16 hex digits of all values that were trained."""

    def close(self) -> None:
        """Free the memory of the tensors; `state` reads them again."""
