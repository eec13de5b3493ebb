"""Read one file, .safetensors or of torch.save: a state dict, or a training checkpoint that
contains one, and metadata.
"""

from pathlib import Path

from accel.checkpoints import Contents
from accel.checkpoints.facts import METADATA_KEY, arguments_of, foreign_entries, from_header
from accel.checkpoints.names import network_in
from accel.errors import InputRef
from accel.tensors.tensor_files import read_safetensors, read_tensors


def matches(path: Path) -> bool:
    """Return whether `path` is a file, not a folder."""
    return not path.is_dir()


def read(path: Path, given: InputRef, entry: str | None = None) -> Contents:
    """Return the tensors of the network, and the metadata. entry: as for `network_in`. Raises
    UsageError.
    """
    if path.suffix == ".safetensors":
        tensors, header = read_safetensors(path, given.option)
        facts = from_header(header)
        if "family" not in facts:  # another program wrote it
            facts = {**arguments_of(foreign_entries(header)), **facts}
        return Contents(network_in(given, tensors, entry), facts)
    content = read_tensors(path, given.option)
    facts = content.get(METADATA_KEY, {})
    if not isinstance(facts, dict) or "family" not in facts:
        facts = arguments_of(content)
    return Contents(network_in(given, content, entry), facts)
