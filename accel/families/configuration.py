"""Read configuration files (--config) of the families' original repositories. Imports no torch.

A family's record names its `config_reader`, a module with `read(content, given)` → Configuration,
or None if another program wrote the file.
"""

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from accel.errors import InputRef
from accel.families import families
from accel.io.filesystem import read_small

if TYPE_CHECKING:  # brings torch
    from accel.families.spec import ModelSpec


class Configuration(NamedTuple):
    """The content of a configuration file."""

    options: Mapping[str, Any]
    # Option with an unsupported value in the file → reason. A flag can override the option, but not
    # "config".
    refused: Mapping[str, str] = {}
    missing: Mapping[str, str] = {}  # option → path of a missing file
    fetch: Callable[[list[str]], str] = lambda paths: ""  # the command for them, "" if unknown
    latents: tuple[int, int] | None = None  # their channels and side
    family: str = ""  # its name
    given: InputRef = InputRef("", "config")

    def require_computed(self, given: Collection[str], decodes: bool = True) -> None:
        """Raise UsageError for an unsupported value or for missing files. given: the user's
        options, which override the file. decodes: whether a decoder is needed.
        """
        for name, reason in self.refused.items():
            if name not in given or name == "config":
                raise self.given.error(reason)
        unneeded = {*given} if decodes else {*given, "vae", "latent_stats"}
        needed = {name: path for name, path in self.missing.items() if name not in unneeded}
        if needed:
            option, *_ = needed
            remedy = self.fetch([*needed.values()]) or f"put it there, or give `{option}`"
            raise self.given.error(f"cannot find {', '.join(needed.values())}", remedy)

    def require_network(self, given: InputRef, spec: "ModelSpec") -> None:
        """Raise UsageError if a network's family or latents differ from the file's."""
        if spec.family.name != self.family:
            raise given.error(
                f"is a {spec.family.name}, and `config={self.given.name}` is of a {self.family}",
                "drop one",
            )
        latents = spec.in_channels, spec.latent_size
        if self.latents and self.latents != latents:
            channels, side = self.latents
            raise self.given.error(
                f"has latents of {channels} channels and side {side}, and {given.name} of "
                f"{spec.in_channels} and {spec.latent_size}",
                "fix it",
            )


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
