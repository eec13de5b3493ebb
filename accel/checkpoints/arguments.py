"""The arguments of a training run in a checkpoint: each is used, rejected for its value, or listed
as not interpreted.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

from accel.errors import InputRef, shown
from accel.families.spec import FamilyWeights

NAMESPACES = Namespace, SimpleNamespace
ENTRIES = "args", "config"  # where the families' training programs store arguments
TRAINING_STATE = "opt", "optimizer", "scheduler", "lr_scheduler", "scaler"
PROVENANCE_KEYS = "family", "recipe"  # only this program writes these facts


def arguments_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training arguments in a checkpoint by name, and its other entries without tensors.
    A nested argument has a dotted name, such as transport.path_type.
    """
    arguments: dict[str, Any] = {}
    for entry, value in content.items():
        leaves = list(_leaves(value, "" if entry in ENTRIES else f".{entry}"))
        if entry in TRAINING_STATE or any(_is_array(leaf) for _, leaf in leaves):
            continue
        for name, leaf in leaves:
            differs = arguments.get(name, leaf) != leaf  # two entries disagree
            arguments[f"{entry}.{name}" if differs else name] = leaf
    return {name: value for name, value in arguments.items() if name not in PROVENANCE_KEYS}


def flattened(section: Any) -> dict[str, Any]:
    """Flatten nested sections to {dotted name: value}."""
    return dict(_leaves(section, ""))


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    section = vars(value) if isinstance(value, NAMESPACES) else value
    if isinstance(section, Mapping):
        for name, part in section.items():
            yield from _leaves(part, f"{place}.{name}")
    elif value is not None:
        is_scalar = hasattr(value, "item") and not _is_array(value)  # torch or numpy
        yield place.lstrip("."), value.item() if is_scalar else value


def _is_array(value: Any) -> bool:
    """Return whether a value is an array with dimensions, or a list with one."""
    if isinstance(value, (list, tuple)):
        return any(map(_is_array, value))
    return getattr(value, "ndim", 0) > 0


def interpreted(
    given: InputRef, arguments: Mapping[str, Any], weights: FamilyWeights, file: str
) -> dict[str, Any]:
    """Convert training arguments to facts by the family's table. Print the arguments that are not
    in the table. Raises UsageError for an unsupported value.

    file: the file with the arguments, "" if it is the file with the weights.
    """
    table = weights.arguments
    file = file and f"{file}: "
    for name, value in arguments.items():
        supported = table.get(name)
        if isinstance(supported, tuple) and str(value) not in map(str, supported):
            raise given.error(
                f"{file}trained with {name} {shown(value)}, and only {supported[0]} is supported"
            )
    others = [f"{name}={shown(value)}" for name, value in arguments.items() if name not in table]
    if others:
        given.warn(f"{file}arguments not interpreted: {shown(', '.join(others), 300)}")
    facts = {
        fact: arguments[name]
        for name, fact in table.items()
        if isinstance(fact, str) and name in arguments
    }
    try:
        return {**facts, "recipe": weights.recipe(facts, PurePath(given.name).stem)}
    except TypeError as error:
        raise given.error(f"its training arguments cannot be read ({error})", "fix them") from None
