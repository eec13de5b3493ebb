"""Families of networks: one folder each, found by listing this folder. Imports no torch.

<family>/__init__.py   FAMILY, the record: names of models and their defaults, prediction, samplers
<family>/network.py    the reference network
<family>/weights.py    how files and modules of the family are recognised and read
<family>/fast.py       how its weights are packed for the accelerated network
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal, NamedTuple

from accel.errors import UsageError
from accel.files import weights_folder

DEMO = weights_folder() / "demo"


class Defaults(NamedTuple):
    """Values that a model implies for the settings that a user leaves open."""

    image_size: int = 512
    num_classes: int = 1000
    factor: int = 8  # a picture's side / its latent's side
    vae: str = "ema"
    ckpt: str | None = None  # weights that ship with the code
    cfg_scale: float = 4.0
    guidance_channels: int = 3
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    num_sampling_steps: int = 250
    timestep_shift: float = 1.0  # for flows
    class_names: tuple[str, ...] = ()  # names of the trained classes, if they are not ImageNet's
    published: Mapping[int, str] = MappingProxyType({})  # image size → name of a published file


class Family(NamedTuple):
    """The record of a family."""

    name: str
    models: Mapping[str, Defaults]
    prediction: Literal["noise", "velocity"]
    samplers: tuple[str, ...]  # the first is the default
    # Names of tensors that every file of the family has. A file with those of several families
    # is of the one with the most.
    keys: tuple[str, ...]
    code: str  # the package with the modules network and weights; imported late
    # The module whose `pack` serves its accelerated network: its fast.py, or that of another
    # family; "" where it has fp32 and tf32 alone.
    fast: str = ""
    # Flags of the family's own sampling scripts → what to use here.
    script_flags: Mapping[str, str] = MappingProxyType({})
    fetch: str = ""  # the command that fetches published weights, if no plain address serves them

    @property
    def recipe(self) -> Defaults:
        """Return the defaults of models without a name: the first model's, without its file."""
        return next(iter(self.models.values()))._replace(ckpt=None)

    @property
    def shipped(self) -> tuple[str, ...]:
        """Return the names of the models whose weights ship with the code."""
        return tuple(name for name, defaults in self.models.items() if defaults.ckpt)

    @property
    def some_times(self) -> tuple[float, ...]:
        """Return values of t for checks: timesteps, or times of a flow."""
        return (377, 999, 0) if self.prediction == "noise" else (0.377, 1.0, 0.0)

    @property
    def pack(self) -> Callable[..., Any]:
        """Import the function that packs its weights: (reader, model, ops) → fast.Packing.

        Raises UsageError if the family has none.
        """
        if not self.fast:
            raise UsageError(
                f"`precision`: use fp32 or tf32, without `parallel=weights=N`: the family "
                f"{self.name} has no fast.py"
            )
        return import_module(self.fast).pack

    def part(self, name: str) -> ModuleType:
        """Import the family's module `name`: network or weights."""
        return import_module(f"{self.code}.{name}")


@lru_cache(maxsize=1)
def families() -> tuple[Family, ...]:
    """Return the records of all families, in alphabetical order of their folders."""
    folders = sorted(path.parent.name for path in Path(__file__).parent.glob("*/__init__.py"))
    return tuple(import_module(f"{__name__}.{folder}").FAMILY for folder in folders)


def model_names() -> tuple[str, ...]:
    """Return every name that --model takes."""
    return tuple(name for family in families() for name in family.models)


def family_of(model: str) -> Family | None:
    """Return the family that has a model of this name, or None."""
    return next((family for family in families() if model in family.models), None)


def sampler_names() -> tuple[str, ...]:
    """Return the names of all families' samplers, each once."""
    return tuple(dict.fromkeys(name for family in families() for name in family.samplers))


def constructor_of(model: str) -> Callable[..., Any]:
    """Return the constructor of a model's reference network: (input_size=, num_classes=)
    → nn.Module.
    """
    return family_of(model).part("weights").RECOGNISER.models[model]
