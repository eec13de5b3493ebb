"""Read a .safetensors file: a state dict, and metadata in the header."""

from pathlib import Path

from accel.checkpoints import Contents
from accel.checkpoints.facts import foreign_entries, from_header
from accel.checkpoints.names import network_in
from accel.errors import InputRef, UsageError, shown
from accel.tensors.tensor_files import floats_of, read_safetensors


def matches(path: Path) -> bool:
    """Return whether `path` has this format."""
    return path.suffix == ".safetensors" and not path.is_dir()


def read(path: Path, given: InputRef, mapped: bool, entry: str | None = None) -> Contents:
    """Return the tensors of the network, and the metadata. entry: the prefix of the network's
    names, if the file contains several networks. Raises UsageError.
    """
    tensors, header = read_safetensors(path, given.option, mapped)
    state = floats_of(tensors, given)
    facts = from_header(header)
    others = foreign_entries(header)
    if others and "family" not in facts:  # another program wrote it
        from accel.checkpoints.arguments import arguments_of  # lazy import: not for our own files

        facts = {**arguments_of(others), **facts}
    return Contents(network_in(given, state, prefix_in(given, state, entry)), facts)


def prefix_in(given: InputRef, state: dict, entry: str | None) -> str | None:
    """Return the user's entry as a prefix of tensor names, or None. Raises UsageError if no name
    has this prefix.
    """
    if entry is None:
        return None
    prefix = f"{entry.rstrip('.')}."
    if not any(name.startswith(prefix) for name in state):
        raise UsageError(
            f"{given.name} is a state dict itself, and no name in it begins so",
            "drop it",
            parameter="weights_entry",
            value=shown(entry),
        )
    return prefix
