"""A flag as a dataclass field, and the check of a value from the command line or from
Python against it.
"""

import argparse
import numbers
import operator
import os
from collections.abc import Iterable
from dataclasses import Field, field
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from accel.errors import UsageError, path_errors, shown
from accel.files import require_name, require_writable

WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}
CONVERSIONS = {bool: bool, int: operator.index, float: float, str: os.fsdecode}


def flag(help: str, default: Any = None, **argument) -> Any:
    """Return a field with its flag: `argument` as argparse takes it, with the `group` of
    --help. names: flags, where they are not the field's name; ranks: flags in commands of
    many ranks; ranks_only: whether other commands lack it; bounds: least and most;
    convert: the function that checks and converts the value.
    """
    return field(default=default, metadata=dict(help=help, **argument))


def positive(text: str) -> int:
    """Convert a whole number from 1 to a million, for argparse."""
    value = int(text)
    if not 1 <= value <= 10**6:
        raise argparse.ArgumentTypeError(f"{shown(text)}: must be from 1 to 1,000,000")
    return value


def flag_names(item: Field, ranks: bool = False) -> tuple[str, ...]:
    """Return the flags of a field, the main one first; () if it has none. ranks: in a
    command of many ranks.
    """
    names = item.metadata.get("names", ("--" + item.name.replace("_", "-"),))
    if ranks:
        return item.metadata.get("ranks", names)
    return () if item.metadata.get("ranks_only") else names


def base_type(item: Field) -> type:
    """Return the type of a field's value where it is not None."""
    parts = [part for part in get_args(item.type) if part is not NoneType]
    return parts[0] if parts else item.type  # type: ignore[return-value]  # never a text here


def checked(value: Any, item: Field) -> Any:
    """Return a field's value, converted to its type. Raises UsageError if its type,
    choices or bounds exclude it, or one of several values.
    """
    name = item.name
    if "convert" in item.metadata:
        return item.metadata["convert"](value)
    if "nargs" not in item.metadata:
        return _checked(value, item, base_type(item))
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise UsageError(f"`{name}={shown(value)}`: must be several; give a list")
    of_each = item.metadata.get("type", str)
    values = tuple(_checked(part, item, of_each) for part in value)
    if not values:
        raise UsageError(f"`{name}`: give at least one")
    return values


def _checked(value, item, base):
    """Return one value of a flag, converted. A label may be a number or a name."""
    name = item.name
    choices = item.metadata.get("choices")
    if choices and not (isinstance(value, str) and value in choices):
        raise UsageError(f"`{name}={shown(value)}`: choose from {', '.join(choices)}")
    words = WORDS[base]
    if name == "labels":
        words = "a class's number or name"
        base = str if isinstance(value, str) else int
    is_bool = str(getattr(value, "dtype", type(value).__name__)) in ("bool", "torch.bool")
    try:
        if base is float and not isinstance(value, numbers.Real) or is_bool != (base is bool):
            raise TypeError
        value = CONVERSIONS[base](value)
    except (TypeError, RuntimeError, OverflowError):
        raise UsageError(f"`{name}={shown(repr(value))}`: must be {words}") from None
    if value == "":
        raise UsageError(f"`{name}`: is empty; give a value, or leave it out")
    bounds = item.metadata.get("bounds")
    if bounds and not bounds[0] <= value <= bounds[1]:
        raise UsageError(f"`{name}={shown(str(value))}`: must be from {bounds[0]} to {bounds[1]}")
    return value


def check_writable(path: str | Path, name: str = "output") -> None:
    """Make the folder of a file and prove that the file, or a link's target, can be
    written. name: the parameter. Raises UsageError.
    """
    with path_errors(name, path):
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            raise UsageError(f"`{name}={path}`: is a folder, a device or a pipe; name a file")
        target.parent.mkdir(parents=True, exist_ok=True)
        require_name(target)
        require_writable(target.parent)
