"""Read configuration files (--config) of the families' original repositories. Imports no torch.

A family's record names its `config_reader`, a module with `read(content, given)` → Configuration,
or None if another program wrote the file.
"""

import re
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from accel.errors import InputRef, UsageError, shown
from accel.families import families
from accel.io.filesystem import read_small

if TYPE_CHECKING:  # brings torch
    from accel.families.spec import ModelSpec

DECODER_OPTIONS = {"vae", "latent_stats"}
NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+")  # PyYAML parses 1e-6 as a string


class Size(NamedTuple):
    """A size of a network in a configuration file."""

    option: str  # `ckpt` or `guide`, the network of this size; "config": all networks
    entry: str  # its name in the file
    argument: str  # of the reference network's constructor
    value: Any


class Configuration(NamedTuple):
    """The content of a configuration file."""

    options: Mapping[str, Any]
    # Option with an unsupported value in the file → reason. A flag can override the option, but not
    # "config".
    refused: Mapping[str, str] = {}
    missing: Mapping[str, str] = {}  # option → path of a missing file
    fetch: Callable[[list[str]], str] = lambda paths: ""  # the command for them, "" if unknown
    sizes: tuple[Size, ...] = ()
    family: str = ""  # its name
    given: InputRef = InputRef("", "config")

    def require_computed(self, given: Collection[str], decodes: bool = True) -> None:
        """Raise UsageError for an unsupported value or for missing files. given: the user's
        options, which override the file. decodes: whether a decoder is needed.
        """
        for name, reason in self.refused.items():
            if name not in given or name == "config":
                raise self.given.error(reason)
        unneeded = {*given} if decodes else {*given, *DECODER_OPTIONS}
        needed = {name: path for name, path in self.missing.items() if name not in unneeded}
        if needed:
            option, *_ = needed
            remedy = self.fetch([*needed.values()]) or f"put it there, or give `{option}`"
            raise self.given.error(f"cannot find {', '.join(needed.values())}", remedy)

    def require_network(self, parameter: str, given: InputRef, spec: "ModelSpec") -> None:
        """Raise UsageError if a network's family or sizes differ from the file's. parameter: the
        network's option, `ckpt` or `guide`.
        """
        if spec.family.name != self.family:
            raise given.error(
                f"is a {spec.family.name}, and `config={self.given.name}` is of a {self.family}",
                "drop one",
            )
        own = {"config"}
        if self.options.get(parameter) == given.name:
            own.add(parameter)
        for size in self.sizes:
            value = spec.arguments.get(size.argument, size.value)
            if size.option in own and value != size.value:
                raise self.given.error(
                    f"has {size.entry} {size.value}, and {given.name} has {value}", "fix it"
                )


def warn_uninterpreted(given: InputRef, arguments: Mapping[str, Any]) -> None:
    """Print a line that lists the uninterpreted arguments of a file, if any."""
    if arguments:
        listed = ", ".join(f"{shown(name)}={plain(value)}" for name, value in arguments.items())
        given.warn(f"arguments not interpreted: {listed}")


def read(path: str) -> Configuration:
    """Read a configuration file. Raises UsageError if it cannot be read, or if no family reads
    it.
    """
    given = InputRef(path, "config")
    try:
        content = read_yaml(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise given.error(f"cannot be read ({reason})", "give a YAML file") from None
    readers = [family for family in families() if family.config_reader]
    for family in readers:
        file = import_module(family.config_reader).read(content, given)
        if file is not None:
            return file._replace(family=family.name, given=given)
    names = " or ".join(family.name for family in readers)
    raise given.error(f"is not a configuration of {names}", "drop it, and give `ckpt`")


def read_yaml(path: str | Path) -> Any:
    """Read a small YAML file. Raises OSError, or ValueError for any other content."""
    import yaml  # lazy import: only for --config and training configurations

    try:
        return yaml.safe_load(read_small(path).decode())
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError((str(error).splitlines() or [type(error).__name__])[0][:120]) from None


class Entries:
    """The entries of a configuration, by dotted names such as sampler.params.num_steps.

    given: the file, for errors. name: of the configuration, for errors.
    """

    def __init__(self, content: dict, given: InputRef, name: str = ""):
        self.content = content
        self.given = given
        self.name = name

    def section(self, name: str) -> dict[str, Any]:
        """Return a section; {} if it is missing or empty. The name "" is the whole file."""
        section: Any = self.content
        for part in filter(None, name.split(".")):
            section = section.get(part)
            if section is None:
                return {}
            if not isinstance(section, dict):
                raise self.error(f"has {name} {plain(section)}, which must be a section")
        return section

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry, or `default` if it is missing."""
        section, _, entry = name.rpartition(".")
        return self.section(section).get(entry, default)

    def number(
        self,
        name: str,
        default: float,
        low: float,
        high: float,
        kind: type[int] | type[float] = float,
    ) -> Any:
        """Return a number, or `default` if it is missing. kind: int for a whole number."""
        value = self.get(name, default)
        if isinstance(value, str) and NUMBER.fullmatch(value):
            value = float(value)
        if type(value) not in (int, float) or not low <= value <= high or kind(value) != value:
            word = "whole number" if kind is int else "number"
            raise self.error(
                f"has {name} {plain(value)}, which must be a {word} from {low:g} to {high:g}"
            )
        return kind(value)

    def unsupported(self, name: str, default: Any, supported: Any) -> str:
        """Return why an entry's value is not supported, "" if it is. A pair of equal numbers counts
        as one number.
        """
        value = self.get(name, default)
        if value in (supported, [supported, supported]):
            return ""
        return f"has {name} {plain(value)}, and only {plain(supported)} is supported"

    def error(self, reason: str) -> UsageError:
        """Return the error about an entry that the author of the file must fix."""
        return self.given.error(f"{self.name} {reason}".strip(), "fix it")


def plain(value: Any) -> str:
    """Return a value as text."""
    return shown(str(value))
