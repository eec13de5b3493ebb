"""Configuration files of models' own repositories, as --config takes them. Imports no torch.

A family whose record names a module `config_reader` reads its files there, by `read(content,
path)` → ConfigFile, or None for a file of another program.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from accel.errors import UsageError, shown
from accel.families import families
from accel.files import read_small

LARGEST = 1 << 16  # bytes of a YAML file
OF_DECODER = {"vae", "latent_stats"}
NOTHING: Mapping[str, str] = MappingProxyType({})


class ConfigFile(NamedTuple):
    """The options that a configuration file gives."""

    options: Mapping[str, Any]
    # Options whose value in the file is not computed here → the reason. It does not matter where
    # the user gives the option; that of "config" always does.
    refused: Mapping[str, str] = NOTHING
    missing: Mapping[str, str] = NOTHING  # options → paths of files that are not there
    fetch: Callable[[list[str]], str] = ", ".join  # paths → the command that fetches them


@lru_cache(maxsize=8)
def read(path: str) -> ConfigFile:
    """Return the options of a configuration file. Raises UsageError for a file that cannot be
    read, or of no family.
    """
    try:
        content = read_yaml(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"`config={path}`: cannot be read ({reason}); mend it") from None
    names = []
    remedies = []
    for family in families():
        remedy = family.script_flags.get("config")
        if family.config_reader:
            names.append(family.name)
            file = import_module(family.config_reader).read(content, Path(path))
            if file is not None:
                return file
        elif remedy:
            remedies.append(f"; of a {family.name}: {remedy}")
    readers = " or ".join(names) or "a family that is read here"
    raise UsageError(f"`config={path}`: is not a configuration of {readers}{''.join(remedies)}")


def read_yaml(path: str | Path) -> Any:
    """Return the content of a small YAML file. Raises OSError, or ValueError for any other
    content. As in YAML 1.2, 1e-6 is a number.
    """
    import yaml  # brings ten modules

    class Loader(yaml.SafeLoader):
        def flatten_mapping(self, node):
            """No-op: merged mappings can grow without bound, and are then refused as
            unknown tags.
            """

    number = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        return yaml.load(read_small(path, LARGEST).decode(), Loader)
    except (RecursionError, ValueError, yaml.YAMLError) as error:
        raise ValueError((str(error).splitlines() or [type(error).__name__])[0][:120]) from None


def taken(path: str, options: Mapping[str, Any], decodes: bool = True) -> dict[str, Any]:
    """Return the file's values of the options that are None in `options`. decodes: whether a
    decoder is needed. Raises UsageError for values that are not computed here, and one for all
    files that are missing.
    """
    file = read(path)
    given = {name for name, value in options.items() if value is not None} - {"config"}
    scale = options.get("cfg_scale")
    scale = file.options.get("cfg_scale") if scale is None else scale
    if scale is not None and scale <= 1:
        given.add("guide")  # it is not used
    if "ckpt" in given:
        given.add("model")  # the file's model is that of its weights
    for name, reason in file.refused.items():
        if name not in given:
            raise UsageError(f"`config={path}`: {reason}")
    needed = file.missing.keys() - given - (set() if decodes else OF_DECODER)
    missing = [wanted for name, wanted in file.missing.items() if name in needed]
    if missing:
        others = f" (and {len(missing) - 1} more)" if missing[1:] else ""
        raise UsageError(
            f"`config={path}`: names {missing[0]}{others}, which is missing; {file.fetch(missing)}"
        )
    return {name: value for name, value in file.options.items() if name not in given}


def notice(path: str, options: Mapping[str, Any]) -> str:
    """Return the line that says which of `options` the file gave."""
    words = []
    for name, value in read(path).options.items():
        if options.get(name) != value:
            continue
        values = value if isinstance(value, tuple) else (value,)
        text = " ".join(f"{part:g}" if isinstance(part, float) else str(part) for part in values)
        words.append(f"{name.replace('_', ' ')} {shown(text, 300)}")
    return f"{Path(path).name} says {', '.join(words)}; flags override it"
