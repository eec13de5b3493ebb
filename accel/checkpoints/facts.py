"""The facts that lie beside tensors, such as a training run's arguments: checked once as they are
read.

Options are checked as a user's are. Other entries that decide sizes have a type and a range.
Others are kept as they are if they are plain values: a family may know them.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from accel.config.options import OPTIONS
from accel.errors import InputRef, UsageError, shown

OWN = "metadata"  # of a .pt file: the key beside its tensors
PREFIX = "dit."  # of our entries in the header of a safetensors file, whose values are strings


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
# Options whose values files say beside the tensors.
FILE_FACTS = "num_classes", "image_size", "num_heads", "guidance_channels"
# And in a recipe: those that decide how pictures look, none that names a file or a device.
RECIPE_FACTS = (
    *("cfg_scale", "guidance_interval", "image_size", "noise_scale"),
    *("num_sampling_steps", "sampler", "t_eps", "timestep_shift"),
)
LATENT_SETTINGS = {  # settings of a recipe that are no options
    "latent_norm": _Fact(lambda value: isinstance(value, bool), "true or false"),
    "latent_scale": _Fact(
        lambda value: type(value) in (int, float) and 1e-6 <= value <= 1e6,
        "a number from 1e-6 to 1e6",
    ),
}


def option_value(name: str, value: Any) -> Any:
    """Return the value of an option that a file says. A sampler is refused later, unless the user
    names another. Raises TypeError or ValueError.
    """
    if name == "sampler":
        return str(value)
    if isinstance(value, bool):
        raise TypeError(value)
    return OPTIONS[name].checked(value)


def checked_options(given: InputRef, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return options that a file says. where: in it, in words. Raises UsageError about the file."""
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
    """Return the facts that are plain values, those that are known checked. Raises UsageError about
    the file.
    """
    kept: dict[str, Any] = {}
    for name, value in facts.items():
        if name in FACTS and value is not None and not FACTS[name].valid(value):
            raise given.error(
                f"says {name} {shown(value)}, which must be {FACTS[name].meaning}",
                "save it again without that entry",
            )
        if isinstance(name, str) and isinstance(value, (str, int, float, bool, dict, list, tuple)):
            kept[name] = value
    known = {name: kept[name] for name in FILE_FACTS if name in kept}
    kept |= checked_options(given, known, "says")
    recipe = kept.get("recipe", {})
    for name, value in recipe.items():
        if name in LATENT_SETTINGS and not LATENT_SETTINGS[name].valid(value):
            raise given.error(
                f"says {name} {shown(value)}, which must be {LATENT_SETTINGS[name].meaning}",
                "save it again without that entry",
            )
    options = {name: value for name, value in recipe.items() if name not in LATENT_SETTINGS}
    unknown = options.keys() - {*RECIPE_FACTS}
    if unknown:
        raise given.error(f"says {min(unknown)} in its recipe, which is not known", "save it again")
    if recipe:
        kept["recipe"] = {**recipe, **checked_options(given, options, "says")}
    return kept


def to_header(metadata: dict[str, Any]) -> dict[str, str]:
    """Return metadata as the header of a safetensors file takes it."""
    return {PREFIX + name: json.dumps(value) for name, value in metadata.items()}


def from_header(header: dict[str, str]) -> dict[str, Any]:
    """Return the metadata in the header of a safetensors file; other programs' entries
    are left out.
    """
    ours = {name: text for name, text in header.items() if name.startswith(PREFIX)}
    return {name.removeprefix(PREFIX): _value(text) for name, text in ours.items()}


def others_in_header(header: dict[str, str]) -> dict[str, Any]:
    """Return the entries of other programs in the header of a safetensors file, but for the
    format, which says nothing of the network.
    """
    ours = PREFIX, "format"
    others = {name: text for name, text in header.items() if not name.startswith(ours)}
    return {name: _value(text) for name, text in others.items()}


def _value(text: str) -> Any:
    """Return the value that an entry of a header stands for."""
    try:
        return json.loads(text)
    except ValueError:
        return text
