"""Read a file of torch.save: a state dict, or a training checkpoint that contains one."""

from pathlib import Path

from accel.checkpoints import Contents
from accel.checkpoints.arguments import arguments_of
from accel.checkpoints.facts import OWN
from accel.checkpoints.names import network_in
from accel.errors import InputRef
from accel.tensors.tensor_files import read_tensors


def matches(path: Path) -> bool:
    """Return whether `path` is a file, not a folder."""
    return not path.is_dir()


def read(path: Path, given: InputRef, entry: str | None = None) -> Contents:
    """Return the tensors of the network, and the metadata. entry: as for `network_in`. Raises
    UsageError.
    """
    content = read_tensors(path, given.option)
    facts = content.get(OWN)
    if not isinstance(facts, dict) or "family" not in facts:
        facts = arguments_of(content)
    return Contents(network_in(given, content, entry), facts)
