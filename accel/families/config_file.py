"""Configuration files of models' own repositories, as --config takes them. Imports no torch.

A family whose record names a module `config_reader` reads its files there, by `read(content,
path)` → ConfigFile, or None for a file of another program.
"""

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from accel.errors import UsageError, shown
from accel.families import families, family_of
from accel.files import read_small

if TYPE_CHECKING:  # brings torch
    from accel.families.recognise import Fit

MISSING = object()  # of an entry that a file lacks
LARGEST = 1 << 16  # bytes of a YAML file
OF_DECODER = {"vae", "latent_stats"}
NOTHING: Mapping[str, str] = MappingProxyType({})


class Size(NamedTuple):
    """A size of a network that a configuration file says."""

    option: str  # that names the network's file; "config": the size of every network
    entry: str  # as the file spells it
    argument: str  # of the reference network's constructor
    value: Any


class ConfigFile(NamedTuple):
    """The options that a configuration file gives."""

    options: Mapping[str, Any]
    # Options whose value in the file is not computed here → the reason. It does not matter where
    # the user gives the option; that of "config" always does.
    refused: Mapping[str, str] = NOTHING
    missing: Mapping[str, str] = NOTHING  # options → paths of files that are not there
    fetch: Callable[[list[str]], str] = lambda paths: ""  # the command for them, "" if unknown
    sizes: tuple[Size, ...] = ()
    family: str = ""  # its name


def read(path: str) -> ConfigFile:
    """Return the options of a configuration file. Raises UsageError for a file that cannot be
    read, or of no family.
    """
    try:
        content = read_yaml(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        wanted = "give its path" if isinstance(error, FileNotFoundError) else "mend it"
        raise UsageError(f"`config={path}`: cannot be read ({reason}); {wanted}") from None
    readers = [family for family in families() if family.config_reader]
    for family in readers:
        file = import_module(family.config_reader).read(content, Path(path))
        if file is not None:
            return file._replace(family=family.name)
    names = " or ".join(family.name for family in readers) or "a family that is read here"
    raise UsageError(
        f"`config={path}`: is not a configuration of {names}; drop it, and give `ckpt`"
    )


class Reader:
    """The entries of a configuration, by dotted names such as sampler.params.num_steps.

    where: the file, as errors begin.
    """

    def __init__(self, content: dict, where: str):
        self.content = content
        self.where = where

    def section(self, name: str) -> dict[str, Any]:
        """Return a section, of the name "" the whole; {} if it is missing or empty."""
        section: Any = self.content
        for part in filter(None, name.split(".")):
            section = section.get(part)
            if section is None:
                return {}
            if not isinstance(section, dict):
                raise self.error(f"says {name} {plain(section)}, which must be a section")
        return section

    def get(self, name: str, usual: Any = None) -> Any:
        """Return an entry of a section, `usual` if it is missing."""
        section, _, entry = name.rpartition(".")
        return self.section(section).get(entry, usual)

    def number(
        self,
        name: str,
        usual: float,
        low: float,
        high: float,
        kind: type[int] | type[float] = float,
    ) -> Any:
        """Return a number, `usual` if it is missing. kind: int for a whole number."""
        value = self.get(name, usual)
        if type(value) not in (int, float) or not low <= value <= high or kind(value) != value:
            word = "whole number" if kind is int else "number"
            raise self.error(
                f"says {name} {plain(value)}, which must be a {word} from {low:g} to {high:g}"
            )
        return kind(value)

    def otherwise(self, name: str, usual: Any, computed: Any) -> str:
        """Return what an entry says in words if it is not the computed value, else "". A pair may
        stand for one value.
        """
        value = self.get(name, usual)
        if value in (computed, [computed, computed]):
            return ""
        says = f"says {name} {plain(value)}"
        if self.get(name, MISSING) is MISSING:
            says = f"says no {name}, which is then {plain(usual)}"
        return f"{says}, and only {plain(computed)} is computed"

    def error(self, reason: str) -> UsageError:
        """Return the error for an entry that the file's author must change."""
        return UsageError(f"{self.where} {reason}; mend it")


def plain(value: Any) -> str:
    """Return a value as text; of a long list or a mapping, which in YAML can be huge, the type
    alone.
    """
    short = isinstance(value, (str, int, float, bool, type(None)))
    short = short or isinstance(value, list) and len(value) < 5 and "[" not in str(value)[1:]
    return shown(str(value)) if short else f"of type {type(value).__name__}"


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

        def construct_mapping(self, node, deep=False):
            """Refuse a name that a section has twice, of which yaml would take the last."""
            names = set()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if str(key.value) in names:
                    raise ValueError(f"says {shown(str(key.value))} twice")
                names.add(str(key.value))
            return super().construct_mapping(node, deep)

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
    model = options.get("model")
    family = family_of(model) if model else None
    if family is not None and family.name != file.family:
        raise UsageError(
            f"`model={model}`: is a {family.name}, and `config={path}` is of a {file.family}; drop "
            "one"
        )
    given = {name: value for name, value in options.items() if value is not None}
    if {**file.options, **given}.get("cfg_scale", 2.0) <= 1:
        given["guide"] = None  # it is not used
    for name, reason in file.refused.items():
        if name not in given or name == "config":
            raise UsageError(f"`config={path}`: {reason}")
    needed = {
        name: file_path
        for name, file_path in file.missing.items()
        if name not in given and (decodes or name not in OF_DECODER)
    }
    if needed:
        first, *others = needed
        more = f" (and {len(others)} more)" if others else ""
        remedy = file.fetch([*needed.values()]) or f"put it there, or give `{first}`"
        raise UsageError(
            f"`config={path}`: names {needed[first]}{more}, which is missing; {remedy}"
        )
    return {name: value for name, value in file.options.items() if name not in given}


def require_network(path: str, option: str, name: str, fit: "Fit") -> None:
    """Raise UsageError for a network of another family than the file's, or of other sizes than
    the file says. option, name: the parameter with its weights, and their name.
    """
    file = read(path)
    if fit.family.name != file.family:
        raise UsageError(
            f"`{option}={name}`: is a {fit.family.name}, and `config={path}` is of a "
            f"{file.family}; drop one"
        )
    options = {"config", option} if file.options.get(option) == name else {"config"}
    built = fit.build.keywords  # type: ignore
    for size in file.sizes:
        value = built.get(size.argument, size.value)
        if size.option in options and value != size.value:
            raise UsageError(
                f"`config={path}`: says {size.entry} {size.value}, and {name} has {value}; mend it"
            )


def notice(path: str, options: Mapping[str, Any]) -> str:
    """Return the line that says which of `options` the file gave."""
    given = read(path).options.items()
    same = {name: value for name, value in given if options.get(name) == value}
    return f"{Path(path).name} says {in_words(same)}; flags override it"


def in_words(options: Mapping[str, Any]) -> str:
    """Return options with their values, such as "cfg scale 1.5, guidance interval 0 0.7"."""
    words = []
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        text = " ".join(f"{part:g}" if isinstance(part, float) else str(part) for part in values)
        words.append(f"{name.replace('_', ' ')} {shown(text, 300)}")
    return ", ".join(words)
