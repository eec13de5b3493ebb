"""Read a .safetensors file: a state dict, and metadata in the header."""

from pathlib import Path

from accel.checkpoints import Contents
from accel.checkpoints.facts import foreign_entries, from_header
from accel.checkpoints.names import network_in
from accel.errors import InputRef
from accel.tensors.tensor_files import read_safetensors


def matches(path: Path) -> bool:
    """Return whether `path` has this format."""
    return path.suffix == ".safetensors" and not path.is_dir()


def read(path: Path, given: InputRef, entry: str | None = None) -> Contents:
    """Return the tensors of the network, and the metadata. entry: as for `network_in`. Raises
    UsageError.
    """
    tensors, header = read_safetensors(path, given.option)
    facts = from_header(header)
    others = foreign_entries(header)
    if others and "family" not in facts:  # another program wrote it
        from accel.checkpoints.arguments import arguments_of  # lazy import: not for our own files

        facts = {**arguments_of(others), **facts}
    return Contents(network_in(given, tensors, entry), facts)
