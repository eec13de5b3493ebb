"""The YAML file next to a file of weights, as some training programs write it."""

from pathlib import Path
from typing import Any

from accel.checkpoints.arguments import flattened
from accel.errors import InputRef
from accel.families.configuration import read_yaml
from accel.tensors.tensor_files import FILE_SUFFIXES


def arguments_beside(path: Path, given: InputRef) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of the YAML file of a file of weights: of the file with
    its name, else of the only one in its folder that has no other weights' name; ("", {}) without
    one. Raises UsageError for a file that cannot be read.
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
