"""Families of networks: one folder each, found by listing this folder. Imports no torch.

<family>/__init__.py   FAMILY, the record: names of models and their defaults, prediction, samplers,
                       and what in a file says that it is the family's
<family>/network.py    the reference network
<family>/weights.py    how files and modules of the family are recognised and read
<family>/fast.py       how its weights are packed for the accelerated network; the record names it
<family>/config_file.py    how configuration files of its own repository are read; the record
                       names it

configuration.py reads the files of --config by these modules.
"""

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal, NamedTuple

from accel.errors import UsageError
from accel.io.filesystem import weights_folder

DEMO = weights_folder() / "demo"

# The labels of an FID job with n pictures of K classes:
#     random          drawn after each batch's z
#     by_number       i mod K for picture i
#     class_by_class  i·K // n for picture i; a rank makes a contiguous run of each round
#     permuted        n/K of each class in random order, a contiguous part a rank
LabelOrder = Literal["random", "by_number", "class_by_class", "permuted"]


# How guidance's interval is compared with an evaluation: accel/sampling/intervals.py.
IntervalRule = Literal[
    "float64 levels", "float32 levels", "float32 times", "float32 times, no ends"
]


class Defaults(NamedTuple):
    """Values that a model implies for the settings that a user leaves open."""

    image_size: int = 512
    num_classes: int = 1000
    factor: int = 8  # a picture's side / its latent's side
    vae: str = "ema"
    latent_stats: str | None = None  # file of the latents' statistics
    ckpt: str | None = None  # weights that ship with the code
    cfg_scale: float = 4.0
    guidance_channels: int = 3
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    num_sampling_steps: int = 250
    timestep_shift: float = 1.0  # for flows
    noise_scale: float = 1.0  # of the first noise, and
    t_eps: float = 0.05  # the least 1 − t, of networks that estimate data
    class_names: tuple[str, ...] = ()  # names of the trained classes, if they are not ImageNet's
    published: Mapping[int, str] = MappingProxyType({})  # image size → name of a published file


def as_they_are(defaults: Defaults, channels: int, side: int | None) -> Defaults:
    """Return the defaults of a family whose latents change none of them."""
    return defaults


def all_channels(defaults: Defaults, channels: int, side: int | None) -> Defaults:
    """Return the defaults of a family that guides all channels."""
    return defaults._replace(guidance_channels=channels)


class Family(NamedTuple):
    """The record of a family. All that files are asked about every family is here: a file
    imports the modules of its own family alone.
    """

    name: str
    models: Mapping[str, Defaults]  # by names that end in / and the patch side, as in DiT-XL/2
    prediction: Literal["noise", "velocity", "data"]
    samplers: tuple[str, ...]  # the first is the default
    # Names of tensors that every file of the family has. A file with those of several families
    # is of the one with the most.
    keys: tuple[str, ...]
    code: str  # the package with the modules network and weights; imported late
    # The module whose `pack` serves its accelerated network: its fast.py, or that of another
    # family; "" where it has fp32 and tf32 alone.
    fast: str = ""
    config_reader: str = ""  # the module that reads the family's files for --config
    fetch: str = ""  # the command that fetches published weights, if no plain address serves them
    # Beginnings of names of tensors that prove the family, among those with the same keys.
    marks: tuple[str, ...] = ()
    # Arguments that its training program writes, and no program of a family with the same keys:
    # name → values, () for any. They tell the families apart.
    arguments: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    files: Mapping[str, str] = MappingProxyType({})  # name of a published file → model
    # model → its name in the training program, where that is another name
    names_in_training: Mapping[str, str] = MappingProxyType({})
    # What its original does otherwise than the others':
    interval_rule: IntervalRule = "float64 levels"
    heun_by_start: bool = True  # whether both evaluations of a step have its start's guidance
    last_time: float = 1.0  # end of an ODE's even times
    # Labels of FID jobs, usually and with --balanced-labels.
    label_orders: tuple[LabelOrder, LabelOrder] = ("random", "by_number")
    any_size: bool = True  # whether it samples sizes that it was not trained for
    # Options of the family's own FID program whose defaults differ from those of its models.
    fid_defaults: Mapping[str, Any] = MappingProxyType({})
    # Returns a model's defaults for latents of so many channels and of a side, None if unknown.
    defaults_for: Callable[[Defaults, int, int | None], Defaults] = as_they_are

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
                f"use fp32 or tf32: the family {self.name} has no fast.py", parameter="precision"
            )
        return import_module(self.fast).pack

    def is_marked(self, names: Collection[str]) -> bool:
        """Return whether tensors with these `names` prove the family."""
        return any(name.startswith(mark) for mark in self.marks for name in names)

    def writes(self, name: str, value: Any) -> bool:
        """Return whether the family's training program, among programs of families with the same
        tensors, writes this value of an argument.
        """
        if name == "model":
            return self.calls_models_as(value)
        values = self.arguments.get(name)
        return values is not None and (not values or value in values)

    def calls_models_as(self, name: Any) -> bool:
        """Return whether a model's name begins as names of the family's models do here or in its
        training program, as DiT-Tiny/2 does.
        """
        names = chain(self.models, self.names_in_training.values())
        return str(name).partition("-")[0] in {each.partition("-")[0] for each in names}

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
    return tuple(chain.from_iterable(family.models for family in families()))


def family_of(model: Any) -> Family | None:
    """Return the family that has a model of this name, or None."""
    return next((family for family in families() if model in family.models), None)


def require_family_of(model: str) -> Family:
    """Return the family that has a model of this name, of which there is one."""
    family = family_of(model)
    assert family is not None
    return family


def sampler_names() -> tuple[str, ...]:
    """Return the names of all families' samplers, each once."""
    return tuple(dict.fromkeys(chain.from_iterable(family.samplers for family in families())))


def constructor_of(model: str) -> Callable[..., Any]:
    """Return the constructor of a model's reference network: (input_size=, num_classes=)
    → nn.Module.
    """
    family = require_family_of(model)
    return family.part("weights").WEIGHTS.models[model]
