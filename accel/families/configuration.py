"""Configuration files of the families' own repositories, as --config takes them, and entries of
configurations that other programs wrote. Imports no torch.

A family whose record names a module `config_reader` reads its files there, by `read(content,
given)` → Configuration, or None for a file of another program.
"""

import re
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from accel.errors import Given, UsageError, shown
from accel.families import families
from accel.files import read_small

if TYPE_CHECKING:  # brings torch
    from accel.families.spec import ModelSpec

MISSING = object()  # of an entry that a file lacks
OF_DECODER = {"vae", "latent_stats"}
NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+")  # yaml takes 1e-6 for text


class Size(NamedTuple):
    """A size of a network that a configuration file says."""

    option: str  # that names the network's file; "config": the size of every network
    entry: str  # as the file spells it
    argument: str  # of the reference network's constructor
    value: Any


class Configuration(NamedTuple):
    """The content of a configuration file."""

    options: Mapping[str, Any]
    # Options whose value in the file is not computed here → the reason. It does not matter where
    # the user gives the option; that of "config" always does.
    refused: Mapping[str, str] = {}
    missing: Mapping[str, str] = {}  # options → paths of files that are not there
    fetch: Callable[[list[str]], str] = lambda paths: ""  # the command for them, "" if unknown
    sizes: tuple[Size, ...] = ()
    family: str = ""  # its name
    given: Given = Given("", "config")

    def require_computed(self, given: Collection[str], decodes: bool = True) -> None:
        """Raise UsageError for a value that is not computed here, and for missing files, all in one
        error. given: options that the user gives. decodes: whether a decoder is needed.
        """
        for name, reason in self.refused.items():
            if name not in given or name == "config":
                raise self.given.error(reason)
        needed = {
            name: path
            for name, path in self.missing.items()
            if name not in given and (decodes or name not in OF_DECODER)
        }
        if needed:
            first, *others = needed
            more = f" (and {len(others)} more)" if others else ""
            remedy = self.fetch([*needed.values()]) or f"put it there, or give `{first}`"
            raise self.given.error(f"names {needed[first]}{more}, which is missing", remedy)

    def require_network(self, parameter: str, given: Given, spec: "ModelSpec") -> None:
        """Raise UsageError for a network of another family than the file's, or of other sizes than
        the file says. parameter: `ckpt` or `guide`, which names the network.
        """
        if spec.family.name != self.family:
            raise given.error(
                f"is a {spec.family.name}, and `config={self.given.name}` is of a {self.family}",
                "drop one",
            )
        is_named = self.options.get(parameter) == given.name
        for size in self.sizes:
            value = spec.arguments.get(size.argument, size.value)
            applies = size.option == "config" or is_named and size.option == parameter
            if applies and value != size.value:
                raise self.given.error(
                    f"says {size.entry} {size.value}, and {given.name} has {value}", "mend it"
                )


def read(path: str) -> Configuration:
    """Return what a configuration file says. Raises UsageError for a file that cannot be read, or
    of no family.
    """
    given = Given(path, "config")
    try:
        content = read_yaml(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        wanted = "give its path" if isinstance(error, FileNotFoundError) else "mend it"
        raise given.error(f"cannot be read ({reason})", wanted) from None
    readers = [family for family in families() if family.config_reader]
    for family in readers:
        file = import_module(family.config_reader).read(content, given)
        if file is not None:
            return file._replace(family=family.name, given=given)
    names = " or ".join(family.name for family in readers) or "a family that is read here"
    raise given.error(f"is not a configuration of {names}", "drop it, and give `ckpt`")


def read_yaml(path: str | Path) -> Any:
    """Return the content of a small YAML file. Raises OSError, or ValueError for any other
    content.
    """
    import yaml  # few runs have such a file

    try:
        return _with_numbers(yaml.safe_load(read_small(path).decode()))
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError((str(error).splitlines() or [type(error).__name__])[0][:120]) from None


def _with_numbers(value: Any) -> Any:
    """Return a value with the numbers that YAML 1.1 takes for text."""
    if isinstance(value, dict):
        return {name: _with_numbers(part) for name, part in value.items()}
    if isinstance(value, list):
        return list(map(_with_numbers, value))
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value


class Entries:
    """The entries of a configuration, by dotted names such as sampler.params.num_steps.

    given: the file, about which errors are. name: of the configuration in errors.
    """

    def __init__(self, content: dict, given: Given, name: str = ""):
        self.content = content
        self.given = given
        self.name = name

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
        return self.given.error(f"{self.name} {reason}".strip(), "mend it")


def plain(value: Any) -> str:
    """Return a value as text."""
    return shown(str(value))
