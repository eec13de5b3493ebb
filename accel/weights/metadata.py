"""The facts that lie beside tensors, such as a training run's arguments: one schema,
checked once as they are read.

Entries that decide pictures or sizes have a type and a range. Others are kept as they are
if they are plain values: a family may know them.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

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
        isinstance(name, str) and name.isprintable() for name in value
    )


def _is_number(value, low, high):
    return type(value) in (int, float) and low <= value <= high  # false for NaN


def _is_interval(value):
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(_is_number(end, 0, 1) for end in value)
        and value[0] < value[1]
    )


RECIPE = {  # settings of a recipe → whether a value is valid
    "cfg_scale": lambda value: _is_number(value, 0, 10**6),
    "guidance_interval": _is_interval,
    "image_size": lambda value: type(value) is int and 1 <= value <= 8192,
    "latent_norm": lambda value: isinstance(value, bool),
    "latent_scale": lambda value: _is_number(value, 1e-6, 1e6),
    "noise_scale": lambda value: _is_number(value, 0.001, 1000),
    "num_sampling_steps": lambda value: type(value) is int and 1 <= value <= 1000,
    "sampler": lambda value: isinstance(value, str) and len(value) <= 100,
    "t_eps": lambda value: _is_number(value, 1e-6, 1),
    "timestep_shift": lambda value: _is_number(value, 0.01, 100),
}


def _is_recipe(value):
    """Return whether a value is a dict of settings that this program wrote."""
    return isinstance(value, dict) and all(
        name in RECIPE and RECIPE[name](setting) for name, setting in value.items()
    )


_TEXT = _Entry(lambda value: isinstance(value, str) and len(value) <= 4096, "text")
SCHEMA = {
    "family": _TEXT,  # a family's name
    "model": _TEXT,
    "vae": _TEXT,
    "num_classes": _whole(1, 10**6),
    "image_size": _whole(1, 8192),  # pixels of a side, at which the weights were trained
    "num_heads": _whole(1, 1024),
    "patch_size": _whole(1, 64),
    "in_channels": _whole(1, 8192),  # of the latents
    "guidance_channels": _whole(1, 8192),
    "recipe": _Entry(_is_recipe, "values of settings by name"),
    "class_names": _Entry(_is_names, "a list of names"),
}


def checked(source: object, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that are not None, those with a name in SCHEMA checked. Raises
    UsageError, naming the file `source` and the entry.
    """
    kept = {}
    for name, value in facts.items():
        if name in SCHEMA and value is not None and not SCHEMA[name].valid(value):
            raise UsageError(
                f"`ckpt={source}`: says {name} {shown(value)}, which must be "
                f"{SCHEMA[name].meaning}; save it again without that entry"
            )
        if isinstance(name, str) and isinstance(value, (str, int, float, bool, dict, list, tuple)):
            kept[name] = value
    return kept


def to_header(metadata: dict[str, Any]) -> dict[str, str]:
    """Return metadata as the header of a safetensors file takes it."""
    return {PREFIX + name: json.dumps(value) for name, value in metadata.items()}


def from_header(header: dict[str, str]) -> dict[str, Any]:
    """Return the metadata in the header of a safetensors file; other programs' entries
    are left out.
    """
    facts = {}
    for name, text in header.items():
        if name.startswith(PREFIX):
            try:
                facts[name.removeprefix(PREFIX)] = json.loads(text)
            except (ValueError, RecursionError):
                facts[name.removeprefix(PREFIX)] = text
    return facts
