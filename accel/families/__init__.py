"""Families of networks: one folder each, found by listing this folder. Imports no torch.

<family>/__init__.py       the record FAMILY: models, defaults, how files are recognised
<family>/network.py        the reference network
<family>/weights.py        reads files and modules of the family
<family>/fast.py           packs weights for the accelerated network; named in the record
<family>/config_file.py    reads --config files of its repository; named in the record
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from accel.errors import UsageError
from accel.io.filesystem import ROOT, checkout_version, place_for, weights_folder

FOLDER = weights_folder()
LOCAL_DIR = f"--local-dir {place_for('', FOLDER)}"  # of `hf download`
# ships with a checkout
DEMO = (ROOT / "pretrained_models" if checkout_version() else FOLDER) / "demo"

# The labels of an FID job with n pictures of K classes:
#     random          drawn after each batch's z
#     by_number       i mod K for picture i
#     class_by_class  i·K // n for picture i; each rank makes a contiguous part of a round
#     permuted        n/K of each class in random order; each rank makes a contiguous part
LabelOrder = Literal["random", "by_number", "class_by_class", "permuted"]


# How guidance's interval is compared with an evaluation: accel/sampling/guidance.py.
IntervalRule = Literal[
    "float64 levels", "float32 levels", "float32 times", "float32 times, no ends"
]


class Defaults(NamedTuple):
    """A model's default values of options."""

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
    noise_scale: float = 1.0  # of the first noise
    t_eps: float = 0.05  # lower bound of the divisor 1 − t of networks that estimate data
    class_names: tuple[str, ...] = ()  # if the classes are not ImageNet's
    published: Mapping[int, str] = MappingProxyType({})  # image size → name of a published file


def all_channels(defaults: Defaults, channels: int, side: int | None) -> Defaults:
    """Return the defaults of a family that guides all channels."""
    return defaults._replace(guidance_channels=channels)


class Family(NamedTuple):
    """The record of a family: all facts that are needed before its modules are imported."""

    name: str
    models: Mapping[str, Defaults]  # by names that end in / and the patch side, as in DiT-XL/2
    prediction: Literal["noise", "velocity", "data"]
    samplers: tuple[str, ...]  # the first is the default
    # Names of tensors that all its files have. If the keys of several families fit, the family with
    # the most keys is taken.
    keys: tuple[str, ...]
    code: str  # the package with the modules network and weights; imported late
    # The module with `pack` for the accelerated network, maybe another family's; "" if the family
    # has only fp32 and tf32.
    fast: str = ""
    config_reader: str = ""  # the module that reads the family's files for --config
    fetch: str = ""  # the command that fetches published weights, if no plain address serves them
    # Prefixes of tensor names that prove the family among families with the same keys.
    marks: tuple[str, ...] = ()
    # Arguments that, among families with the same keys, only its training program writes: name →
    # values, () for any.
    arguments: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    files: Mapping[str, str] = MappingProxyType({})  # name of a published file → model
    # Of families whose tensors have another family's names: part of the name of their modules'
    # class, and attributes by which it differs from another family's class of this name.
    class_name: str = ""
    attributes: tuple[str, ...] = ()
    diffusers_key: str = ""  # a tensor that every module of diffusers' class has
    # model → its name in the training program, if different
    names_in_training: Mapping[str, str] = MappingProxyType({})
    # Differences between the families' original programs.
    interval_rule: IntervalRule = "float64 levels"
    heun_by_start: bool = True  # as in accel/sampling/flow.py
    last_time: float = 1.0  # end of an ODE's even times
    # Labels of FID jobs, by default and with --balanced-labels.
    label_orders: tuple[LabelOrder, LabelOrder] = ("random", "by_number")
    any_size: bool = True  # whether it can sample other sizes than the trained one
    # Defaults of its FID program that differ from the models' defaults.
    fid_defaults: Mapping[str, Any] = MappingProxyType({})
    # (a model's defaults, channels, side or None) → the defaults for such latents, if they depend
    # on them.
    defaults_for: Callable[[Defaults, int, int | None], Defaults] | None = None

    def defaults_of(self, model: str) -> Defaults:
        """Return a model's defaults; for an unnamed size the first model's, without weights."""
        return self.models.get(model) or next(iter(self.models.values()))._replace(ckpt=None)

    @property
    def shipped(self) -> tuple[str, ...]:
        """Return the names of models whose weights ship with the code."""
        return tuple(name for name, defaults in self.models.items() if defaults.ckpt)

    @property
    def some_times(self) -> tuple[float, ...]:
        """Return three values of t for checks: timesteps, or times of a flow."""
        return (377, 999, 0) if self.prediction == "noise" else (0.377, 1.0, 0.0)

    @property
    def pack(self) -> Callable[..., Any]:
        """Import the function that packs weights: (reader, model, ops) → fast.Packing.

        Raises UsageError if the family has none.
        """
        if not self.fast:
            raise UsageError(
                f"use fp32 or tf32: the family {self.name} has no fast.py", parameter="precision"
            )
        return import_module(self.fast).pack

    def writes(self, name: str, value: Any) -> bool:
        """Return whether the family's training program, among programs of families with the same
        tensors, writes this value of an argument.
        """
        if name == "model":  # by its prefix: DiT-Tiny/2 is a DiT
            names = chain(self.models, self.names_in_training.values())
            return str(value).partition("-")[0] in {each.partition("-")[0] for each in names}
        values = self.arguments.get(name)
        return values is not None and (not values or value in values)

    @property
    def weights(self) -> Any:
        """Import the `FamilyWeights` (spec.py), the functions by which the family reads weights."""
        return import_module(f"{self.code}.weights").WEIGHTS


@lru_cache(maxsize=1)
def families() -> tuple[Family, ...]:
    """Return the records of all families, in alphabetical order of their folders."""
    folders = sorted(path.parent.name for path in Path(__file__).parent.glob("*/__init__.py"))
    return tuple(import_module(f"{__name__}.{folder}").FAMILY for folder in folders)


def model_names() -> tuple[str, ...]:
    """Return all names of models."""
    return tuple(chain.from_iterable(family.models for family in families()))


def family_of(model: Any) -> Family | None:
    """Return the family that has a model of this name, or None."""
    return next((family for family in families() if model in family.models), None)


def require_family_of(model: str) -> Family:
    """Return the family that has a model of this name, which must exist."""
    family = family_of(model)
    assert family is not None
    return family


def published_names() -> set[str]:
    """Return the names of published weights that are downloaded by name."""
    models = chain.from_iterable(family.models.values() for family in families())
    return {*chain.from_iterable(defaults.published.values() for defaults in models)}


def sampler_names() -> tuple[str, ...]:
    """Return the names of all families' samplers, each once."""
    return tuple(dict.fromkeys(chain.from_iterable(family.samplers for family in families())))


def constructor_of(model: str) -> Callable[..., Any]:
    """Return the constructor of a model's reference network: (input_size=, num_classes=)
    → nn.Module.
    """
    return require_family_of(model).weights.models[model]
