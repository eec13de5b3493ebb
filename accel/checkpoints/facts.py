"""Validate the metadata of a checkpoint: its facts by name.

Facts that are options get the checks of a user's options. FACTS lists the types and ranges of
further entries. All remaining plain values are kept, for the families to interpret.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from accel.config.options import OPTIONS
from accel.errors import InputRef, UsageError, shown

OWN = "metadata"  # the metadata's key in a .pt file
PREFIX = "dit."  # of our entries in a safetensors header, whose values are strings


class _Fact(NamedTuple):
    valid: Callable[[Any], bool]
    meaning: str


def _whole(low, high):
    return _Fact(
        lambda value: type(value) is int and low <= value <= high,
        f"a whole number from {low} to {high}",
    )


def _is_names(value):
    return isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)


_TEXT = _Fact(lambda value: isinstance(value, str), "text")
FACTS = {
    "family": _TEXT,  # a family's name
    "model": _TEXT,
    "vae": _TEXT,
    "patch_size": _whole(1, 64),
    "in_channels": _whole(1, 8192),  # of the latents
    "learn_sigma": _Fact(lambda value: isinstance(value, bool), "true or false"),
    "class_names": _Fact(_is_names, "a list of names"),
    "recipe": _Fact(lambda value: isinstance(value, dict), "values of settings by name"),
}
# Options that a checkpoint's metadata can set.
FILE_FACTS = "num_classes", "image_size", "num_heads", "guidance_channels"
# Options that a recipe can set: they change the picture, and name no file or device.
RECIPE_FACTS = (
    *("cfg_scale", "guidance_interval", "image_size", "noise_scale"),
    *("num_sampling_steps", "sampler", "t_eps", "timestep_shift"),
)
LATENT_SETTINGS = {  # settings in a recipe that are not options
    "latent_norm": _Fact(lambda value: isinstance(value, bool), "true or false"),
    "latent_scale": _Fact(
        lambda value: type(value) in (int, float) and 1e-6 <= value <= 1e6,
        "a number from 1e-6 to 1e6",
    ),
}


def option_value(name: str, value: Any) -> Any:
    """Validate an option's value from a checkpoint. Raises TypeError or ValueError. A sampler is
    validated later, since the user may choose another one.
    """
    if name == "sampler":
        return str(value)
    if isinstance(value, bool):
        raise TypeError(value)
    return OPTIONS[name].checked(value)


def checked_options(given: InputRef, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Validate options from a checkpoint. where: how errors begin. Raises UsageError."""
    values = {}
    for name, value in options.items():
        try:
            values[name] = option_value(name, value)
        except (TypeError, ValueError) as error:
            problem = error.problem if isinstance(error, UsageError) else "is of another type"
            raise given.error(
                f"{where} {name} {shown(value)}: {problem}", "save it again without that entry"
            ) from None
    return values


def checked(given: InputRef, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Validate the known facts, and drop values that are not plain. Raises UsageError."""
    kept: dict[str, Any] = {}
    for name, value in facts.items():
        if name in FACTS and value is not None and not FACTS[name].valid(value):
            raise given.error(
                f"specifies {name} {shown(value)}, which must be {FACTS[name].meaning}",
                "save it again without that entry",
            )
        if isinstance(name, str) and isinstance(value, (str, int, float, bool, dict, list, tuple)):
            kept[name] = value
    known = {name: kept[name] for name in FILE_FACTS if name in kept}
    kept |= checked_options(given, known, "specifies")
    recipe = kept.get("recipe", {})
    for name, value in recipe.items():
        if name in LATENT_SETTINGS and not LATENT_SETTINGS[name].valid(value):
            raise given.error(
                f"specifies {name} {shown(value)}, which must be {LATENT_SETTINGS[name].meaning}",
                "save it again without that entry",
            )
    options = {name: value for name, value in recipe.items() if name not in LATENT_SETTINGS}
    unknown = options.keys() - {*RECIPE_FACTS}
    if unknown:
        raise given.error(
            f"specifies {min(unknown)} in its recipe, which is not known", "save it again"
        )
    if recipe:
        kept["recipe"] = {**recipe, **checked_options(given, options, "specifies")}
    return kept


def to_header(metadata: dict[str, Any]) -> dict[str, str]:
    """Encode metadata for the header of a safetensors file."""
    return {PREFIX + name: json.dumps(value) for name, value in metadata.items()}


def from_header(header: dict[str, str]) -> dict[str, Any]:
    """Decode our metadata in the header of a safetensors file. Ignore other programs' entries."""
    ours = {name: text for name, text in header.items() if name.startswith(PREFIX)}
    return {name.removeprefix(PREFIX): _value(text) for name, text in ours.items()}


def foreign_entries(header: dict[str, str]) -> dict[str, Any]:
    """Return other programs' entries in the header of a safetensors file, except `format`."""
    ours = PREFIX, "format"
    others = {name: text for name, text in header.items() if not name.startswith(ours)}
    return {name: _value(text) for name, text in others.items()}


def _value(text: str) -> Any:
    """Decode a header entry: JSON, or else plain text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
