"""The YAML file that some training programs write next to the weights."""

from pathlib import Path
from typing import Any

from accel.checkpoints.facts import flattened
from accel.errors import InputRef
from accel.families.configuration import read_yaml
from accel.tensors.tensor_files import FILE_SUFFIXES


def yaml_arguments(path: Path, given: InputRef) -> tuple[str, dict[str, Any]]:
    """Find the YAML file of a weights file. Return its name and its arguments, or ("", {}).

    The YAML file has the name of the weights, or is the only one in the folder that does not belong
    to other weights. Raises UsageError if it cannot be read.
    """
    if path.is_dir():
        return "", {}
    file = path.with_suffix(".yaml")
    if not file.is_file():
        others = [
            other
            for other in sorted(path.parent.glob("*.yaml"))
            if not any(other.with_suffix(suffix).is_file() for suffix in FILE_SUFFIXES)
        ]
        if len(others) > 1:
            given.warn(
                f"its folder has {len(others)} YAML files and none is called {file.name}: they are "
                "not read"
            )
        if len(others) != 1:
            return "", {}
        (file,) = others
    try:
        return file.name, flattened(read_yaml(file))
    except (OSError, ValueError) as error:
        raise given.error(f"{file.name} cannot be read ({error})", "fix or move it") from None
