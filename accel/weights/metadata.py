"""The facts that lie beside tensors, such as a training run's arguments: one schema,
checked once as they are read.

Entries that decide pictures or sizes have a type and a range. Others are kept as they are
if they are plain values: a family may know them.
"""

import json
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from accel.errors import UsageError, shown

OWN = "metadata"  # of a .pt file: the key beside its tensors
PREFIX = "dit."  # of our entries in the header of a safetensors file, whose values are strings


class _Entry(NamedTuple):
    valid: Callable[[Any], bool]
    meaning: str


def _whole(low, high):
    return _Entry(
        lambda value: type(value) is int and low <= value <= high,
        f"a whole number from {low} to {high}",
    )


def _is_names(value):
    return isinstance(value, (list, tuple)) and all(
        isinstance(one, str) and one.isprintable() for one in value
    )


def _is_recipe(value):
    """Return whether a value is a dict of settings that this program wrote."""
    bounds = {
        "cfg_scale": (1, 10**6),
        "timestep_shift": (0.01, 100),
        "num_sampling_steps": (1, 1000),
    }
    if not isinstance(value, dict) or value.keys() - {"guidance_interval", *bounds}:
        return False
    ends = value.get("guidance_interval", (0, 1))
    if (
        not isinstance(ends, (list, tuple))
        or len(ends) != 2
        or type(value.get("num_sampling_steps", 1)) is not int
    ):
        return False
    numbers = [(one, 0, 1) for one in ends] + [
        (value[name], *bounds[name]) for name in bounds if name in value
    ]
    return (
        all(type(one) in (int, float) and low <= one <= high for one, low, high in numbers)
        and ends[0] < ends[1]
    )


_TEXT = _Entry(lambda value: isinstance(value, str) and len(value) <= 4096, "text")
SCHEMA = {
    "family": _TEXT,  # a family's name
    "model": _TEXT,
    "vae": _TEXT,
    "num_classes": _whole(1, 10**6),
    "image_size": _whole(1, 8192),  # pixels of a side, at which the weights were trained
    "latent_size": _whole(1, 4096),  # of a side, for which a position table is made
    "num_heads": _whole(1, 1024),
    "patch_size": _whole(1, 64),
    "in_channels": _whole(1, 1024),  # of the latents
    "guidance_channels": _whole(1, 1024),
    "recipe": _Entry(_is_recipe, "values of settings by name"),
    "class_names": _Entry(_is_names, "a list of names"),
}

OURS = "family", "latent_size", "recipe"  # entries that this program alone writes


def of_training(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a training run that may be facts, as plain values. They are
    another program's: what has one of our names and another meaning is left out.
    """
    found = {}
    for name, value in arguments.items():
        value = _plain(value)
        is_fact = name not in SCHEMA or name not in OURS and SCHEMA[name].valid(value)
        if is_fact:
            found[name] = value
    return found


def _plain(value):
    """Return a value of a configuration without numpy's numbers and paths."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return value


def checked(source: object, found: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `found` that are not None, known ones checked. Raises
    UsageError, naming the file `source` and the entry.
    """
    kept = {}
    for name, value in found.items():
        if value is None or not isinstance(name, str):
            continue
        if name in SCHEMA:
            if not SCHEMA[name].valid(value):
                raise UsageError(
                    f"`ckpt={source}`: says {name} {shown(value)}, which must be "
                    f"{SCHEMA[name].meaning}; save it again without that entry"
                )
        elif not isinstance(value, (str, int, float, bool, dict)):
            continue
        kept[name] = value
    return kept


def to_header(metadata: dict[str, Any]) -> dict[str, str]:
    """Return metadata as the header of a safetensors file takes it."""
    return {PREFIX + name: json.dumps(value) for name, value in metadata.items()}


def from_header(header: dict[str, str]) -> dict[str, Any]:
    """Return the metadata in the header of a safetensors file; other programs' entries
    are left out.
    """
    found = {}
    for name, text in header.items():
        if name.startswith(PREFIX):
            try:
                found[name.removeprefix(PREFIX)] = json.loads(text)
            except (ValueError, RecursionError):
                found[name.removeprefix(PREFIX)] = text
    return found
