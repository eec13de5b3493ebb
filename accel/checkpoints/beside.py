"""The YAML file that lies beside a file of weights, as some training programs write it."""

from pathlib import Path
from typing import Any

from accel.checkpoints.arguments import of_function
from accel.errors import Given, shown
from accel.families.configuration import read_yaml
from accel.families.spec import ModelSpec, weights_of
from accel.tensors.computed import UNCLEAR, require_computed
from accel.tensors.tensor_files import FILE_SUFFIXES


def facts_of(path: Path, given: Given) -> dict[str, Any]:
    """Return the name and the content of the YAML file of a file of weights, as `beside`: of the
    file with its name, else of the only one in its folder that has no other weights' name; {}
    without one. Raises UsageError for a file that cannot be read.
    """
    if path.is_dir():
        return {}
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
            return {}
        (file,) = others
    try:
        return {"beside": (file.name, read_yaml(file))}
    except (OSError, ValueError) as error:
        raise given.error(f"{file.name} beside it cannot be read ({error})", "mend it") from None


def require_function(given: Given, beside: tuple[str, Any], spec: ModelSpec) -> None:
    """Raise UsageError if the YAML file says that another function was trained. Print what is not
    understood. beside: as in `facts_of`.
    """
    name, content = beside
    try:
        arguments = of_function(content)
        own = weights_of(spec.family).computed
        unclear = require_computed(arguments, spec.family.prediction, own)
    except ValueError as error:
        raise given.error(f"by {name} beside it, {error}", "move it") from None
    if unclear:
        given.warn(f"{name} beside it says {shown(', '.join(unclear), 300)}, {UNCLEAR}")
