"""The metadata of a checkpoint as facts by name: entries of this program, or arguments of a
training run. Each argument is used, rejected for its value, or listed as not interpreted.

Facts that are options get the checks of a user's options. FACTS lists the types and ranges of
further entries. All remaining plain values are kept, for the families to interpret.
"""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

from accel.config.options import OPTIONS
from accel.errors import InputRef, UsageError, shown
from accel.families.configuration import read_yaml
from accel.families.spec import FamilyWeights
from accel.tensors.tensor_files import FILE_SUFFIXES

METADATA_KEY = "metadata"  # in a .pt file
HEADER_PREFIX = "dit."  # of our entries in a safetensors header, whose values are strings


def _whole(low: int, high: int) -> tuple[Callable[[Any], bool], str]:
    return (
        lambda value: type(value) is int and low <= value <= high,
        f"a whole number from {low} to {high}",
    )


_TEXT = (lambda value: isinstance(value, str), "text")
_FLAG = (lambda value: isinstance(value, bool), "true or false")
# Settings in a recipe that are not options: name → (whether a value is valid, valid values as text)
LATENT_SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "latent_norm": _FLAG,
    "latent_scale": (
        lambda value: type(value) in (int, float) and 1e-6 <= value <= 1e6,
        "a number from 1e-6 to 1e6",
    ),
}
FACTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **LATENT_SETTINGS,
    "family": _TEXT,  # a family's name
    "model": _TEXT,
    "vae": _TEXT,
    "patch_size": _whole(1, 64),
    "in_channels": _whole(1, 8192),  # of the latents
    "learn_sigma": _FLAG,
    "class_names": (
        lambda value: isinstance(value, (list, tuple)) and all(type(each) is str for each in value),
        "a list of names",
    ),
    "recipe": (lambda value: isinstance(value, dict), "values of settings by name"),
}
# Options that a checkpoint's metadata can set.
FILE_FACTS = "num_classes", "image_size", "num_heads", "guidance_channels"
# Options that a recipe can set: they change the picture, and name no file or device.
RECIPE_FACTS = (
    *("cfg_scale", "guidance_interval", "image_size", "noise_scale"),
    *("num_sampling_steps", "sampler", "t_eps", "timestep_shift"),
)
NAMESPACES = Namespace, SimpleNamespace
ARGUMENT_ENTRIES = "args", "config"  # where the families' training programs store arguments
TRAINING_STATE = "opt", "optimizer", "scheduler", "lr_scheduler", "scaler"
PROVENANCE_KEYS = "family", "recipe"  # only this program writes these facts


def checked(given: InputRef, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Validate the known facts, and drop values that are not plain. Raises UsageError."""
    kept = {
        name: _checked(given, name, value, FILE_FACTS)
        for name, value in facts.items()
        if value is not None and isinstance(name, str)
    }
    recipe = kept.get("recipe", {})
    unknown = recipe.keys() - {*RECIPE_FACTS, *LATENT_SETTINGS}
    if unknown:
        raise given.error(
            f"specifies {min(unknown)} in its recipe, which is not known", "save it again"
        )
    kept["recipe"] = {
        name: _checked(given, name, value, RECIPE_FACTS) for name, value in recipe.items()
    }
    plain = str, int, float, bool, dict, list, tuple
    return {name: value for name, value in kept.items() if isinstance(value, plain)}


def _checked(given: InputRef, name: str, value: Any, options: Sequence[str]) -> Any:
    """Validate a fact, or one of the `options`. A sampler is validated later, since the user may
    choose another one.
    """
    is_valid, meaning = FACTS.get(name, (bool, ""))
    problem = f", which must be {meaning}" if meaning and not is_valid(value) else ""
    if name in options:
        try:
            return str(value) if name == "sampler" else OPTIONS[name].checked(value)
        except UsageError as error:
            problem = f": {error.problem}"
    if problem:
        raise given.error(
            f"specifies {name} {shown(value)}{problem}", "save it again without that entry"
        )
    return value


def to_header(metadata: dict[str, Any]) -> dict[str, str]:
    """Encode metadata for the header of a safetensors file."""
    return {HEADER_PREFIX + name: json.dumps(value) for name, value in metadata.items()}


def from_header(header: dict[str, str]) -> dict[str, Any]:
    """Return our metadata in the header of a safetensors file. If another program wrote the file,
    add the training arguments in its entries.
    """
    values = {name: _value(text) for name, text in header.items() if name != "format"}
    others = {name: value for name, value in values.items() if not name.startswith(HEADER_PREFIX)}
    ours = {
        name.removeprefix(HEADER_PREFIX): value
        for name, value in values.items()
        if name not in others
    }
    return ours if "family" in ours else {**arguments_of(others), **ours}


def _value(text: str) -> Any:
    """Decode a header entry: JSON, or else plain text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


# ---- Arguments of a training run ----


def arguments_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training arguments in a checkpoint by name, and its other entries without tensors.
    A nested argument has a dotted name, such as transport.path_type.
    """
    arguments: dict[str, Any] = {}
    for entry, value in content.items():
        leaves = list(_leaves(value, "" if entry in ARGUMENT_ENTRIES else f".{entry}"))
        if entry in TRAINING_STATE or any(_is_array(leaf) for _, leaf in leaves):
            continue
        for name, leaf in leaves:
            differs = arguments.get(name, leaf) != leaf  # two entries disagree
            arguments[f"{entry}.{name}" if differs else name] = leaf
    return {name: value for name, value in arguments.items() if name not in PROVENANCE_KEYS}


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield the values in nested sections, with dotted names that start with `place`."""
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


def yaml_arguments(path: Path, given: InputRef) -> tuple[str, dict[str, Any]]:
    """Find the YAML file of a weights file. Return its name and its arguments, or ("", {}).

    The YAML file has the name of the weights, or is the only one in the folder that does not belong
    to other weights. Raises UsageError if it cannot be read.
    """
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
        return file.name, dict(_leaves(read_yaml(file), ""))
    except (OSError, ValueError) as error:
        raise given.error(f"{file.name} cannot be read ({error})", "fix or move it") from None


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
