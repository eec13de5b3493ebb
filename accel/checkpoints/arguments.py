"""The arguments of a training run in a file of weights: each is used, refused by its value, or
printed as not interpreted.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from accel.errors import Given, shown

NAMESPACES = Namespace, SimpleNamespace
ENTRIES = "args", "config"  # of the arguments in files of the families' own programs
OF_OTHER_PROGRAMS = "hyper_parameters", "hparams", "cfg", "options"
PLAIN = str, int, float, bool, list, tuple
OURS = "family", "recipe"  # facts that this program alone writes


def arguments_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a training run in a file's entries, by their names, and its other
    plain entries. Names in sections have dots, as in transport.path_type.
    """
    arguments: dict[str, Any] = {}
    for entry, value in content.items():
        if isinstance(value, NAMESPACES) or entry in (*ENTRIES, *OF_OTHER_PROGRAMS):
            arguments |= flattened(value, "" if entry in ENTRIES else entry)
        elif isinstance(value, PLAIN[:-2]):
            arguments[entry] = value
    return {name: value for name, value in arguments.items() if name not in OURS}


def flattened(section: Any, place: str = "") -> dict[str, Any]:
    """Return the plain values in a section and in sections inside it, their names after `place`."""
    return {name.lstrip("."): value for name, value in _leaves(section, place)}


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    section = vars(value) if isinstance(value, NAMESPACES) else value
    if isinstance(section, Mapping):
        for name, part in section.items():
            yield from _leaves(part, f"{place}.{name}")
    elif isinstance(value, PLAIN):
        yield place, value


def interpreted(
    given: Given,
    arguments: Mapping[str, Any],
    table: Mapping[str, tuple | str | None],
    file: str = "",
) -> dict[str, Any]:
    """Return the facts that arguments give, by our names. Print the arguments that the family's
    table lacks. Raises UsageError for a value that is not supported. file: the name of another
    file that the arguments are in, with a colon.
    """
    for name, value in arguments.items():
        supported = table.get(name)
        if isinstance(supported, tuple) and str(value) not in map(str, supported):
            raise given.error(
                f"{file}trained with {name} {shown(value)}, and only {supported[0]} is supported"
            )
    others = [f"{name}={shown(value)}" for name, value in arguments.items() if name not in table]
    if others:
        given.warn(f"{file}arguments not interpreted: {shown(', '.join(others), 300)}")
    return {
        fact: arguments[name]
        for name, fact in table.items()
        if isinstance(fact, str) and name in arguments
    }
