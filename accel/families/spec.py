"""A network as data: its family, sizes, and what its training says of sampling. And how a family
reads weights: the functions that its weights.py gives.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from accel.families import Defaults, Family
from accel.tensors.shapes import Shapes, shapes_only

StateDict = dict[str, Tensor]
LABELS = "y_embedder.embedding_table.weight"  # the label table of most families


@dataclass(frozen=True)
class ModelSpec:
    """A network as data.

    model: its name; of a size without a name DiT-2x96/2. network(input_size=, num_classes=,
    class_dropout_prob=, **arguments): the reference network. A family's `identify` gives the first
    fields, accel/families/identify.py the others.
    """

    family: Family
    model: str
    network: Callable[..., nn.Module]
    arguments: Mapping[str, Any]
    num_heads: int
    timestep_embedding: str = ""  # of a module with another one than the reference network
    # Whether no file says the number of heads: it is that of the model of this size.
    assumes_heads: bool = False
    usual_heads: bool = True  # whether the model of this size has this number of heads
    # That decide its function, and follow neither from tensors nor from the model's name.
    facts: Mapping[str, Any] = field(default_factory=dict)
    in_channels: int = 0
    patch_size: int = 0
    num_classes: int = 0
    null_class: bool = True  # whether the label table ends with a row for no class
    learn_sigma: bool = True
    latent_size: int | None = None  # side of the training latents, if known
    image_size: int | None = None  # side of the training pictures, if the file says it
    vae: str | None = None
    class_names: tuple[str, ...] = ()
    # Values of options with which to sample it.
    recommended: Mapping[str, Any] = field(default_factory=dict)
    specified_in: str = ""  # the file that recommends them, if it is not the file of the weights
    # Other settings of its training: the scale of its latents, and whether they are normalised.
    latent_settings: Mapping[str, Any] = field(default_factory=dict)
    # Option, or "" → a line about what is assumed of it, to be printed where it is used.
    assumed: Mapping[str, str] = field(default_factory=dict)

    @property
    def defaults(self) -> Defaults:
        """Return the values that the model, or its family, implies for these latents."""
        defaults = self.family.models.get(self.model, self.family.recipe)
        return self.family.defaults_for(defaults, self.in_channels, self.latent_size)

    @property
    def out_channels(self) -> int:
        """Return the number of channels that the network makes."""
        return 2 * self.in_channels if self.learn_sigma else self.in_channels

    @property
    def trained_side(self) -> int:
        """Return the side of the training latents, which is known of every module."""
        assert self.latent_size is not None
        return self.latent_size

    @property
    def some_times(self) -> tuple[float, ...]:
        """Return values of t for checks."""
        return self.family.some_times

    def changed(self, **fields: Any) -> "ModelSpec":
        """Return the spec with other fields."""
        return replace(self, **fields)

    def empty(self, latent_size: int | None = None) -> nn.Module:
        """Return the reference network for latents of this side, by default the trained one, on
        the meta device: shapes without values.
        """
        side = latent_size or self.latent_size
        sizes = dict(num_classes=self.num_classes, class_dropout_prob=0.1 * self.null_class)
        sizes |= dict(input_size=side) if side else {}
        with shapes_only():
            return self.network(**{**self.arguments, **sizes})

    def digest(self, of_tensors: str) -> str:
        """Return 16 hex digits of all that decides the network's function. of_tensors: the digest
        of its tensors.
        """
        others = [f"{name} {value}" for name, value in sorted(self.facts.items())]
        if not self.usual_heads:
            others.insert(0, f"{self.num_heads} heads")
        text = " ".join([of_tensors, *others])
        return hashlib.sha256(text.encode()).hexdigest()[:16] if others else of_tensors


# ---- How a family reads weights ----


def call_as_dit(x: Tensor, t: Tensor, y: Tensor) -> tuple[tuple, dict]:
    """Return the arguments of models.DiT."""
    return (x, t, y), {}


def unchanged(value: Any) -> Any:
    """Return the value."""
    return value


def forwarded(method: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call the method with the caller's arguments."""
    return method(*arguments, **keywords)


class CallAdapter(NamedTuple):
    """A module and how it is called. The defaults are models.DiT's.

    inputs(x, t, y): arguments and keywords of the module. output(out): the reference network's
    output (N, C', H, W), from the module's. forward, forward_with_cfg: the signature of an
    accelerated copy; called with the copy's own method, which takes the network's arguments, and
    with the caller's arguments. renamed(state): a state dict of the module under the names of the
    family's files. imitates: the class that an accelerated copy claims to be, attributes: its
    further attributes, both for pipelines.
    """

    module: Any
    inputs: Callable[..., tuple[tuple, dict]] = call_as_dit
    output: Callable[[Any], Tensor] = unchanged
    forward: Callable[..., Any] = forwarded
    forward_with_cfg: Callable[..., Any] = forwarded
    renamed: Callable[[StateDict], StateDict] = unchanged
    imitates: type | None = None
    attributes: Mapping[str, Any] = {}


def with_heads(module: Any, state: StateDict) -> tuple[dict[str, Any], CallAdapter]:
    """Return the number of heads of a module that is called as models.DiT is."""
    return {"num_heads": module.num_heads}, CallAdapter(module)


def no_latent_settings(state: StateDict) -> dict[str, Any]:
    """Return no settings of latents."""
    return {}


def no_recipe(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return no settings."""
    return {}


class FamilyWeights(NamedTuple):
    """The functions by which a family reads weights.

    models: name → constructor of the reference network. identify(shapes, facts): the network of
    weights with these shapes; raises KeyError for a missing entry, ValueError for weights that are
    not supported. of_module(module, state): the facts of a module that no tensor holds, such
    as num_heads, and how it is called.
    arguments: each argument of the family's training program, of its process and of its
    constructor → a tuple of its supported values, or the name of the fact that it is, or None:
    it does not matter. recipe(facts): settings of sampling that these facts imply. convert:
    entries of a file → the reference network's. sampled: leaves entries of a file out that
    sampling does not need. latent_settings_of: settings of the latents in a file's entries.
    has_files_beside: whether the arguments may be in a YAML file next to the weights. recommended:
    settings of published files, by their names without suffix. labels: the label table.
    """

    models: Mapping[str, Callable[..., nn.Module]]
    identify: Callable[[Shapes, Mapping[str, Any]], ModelSpec]
    of_module: Callable[[Any, StateDict], tuple[dict[str, Any], CallAdapter]] = with_heads
    arguments: Mapping[str, tuple | str | None] = {}
    recipe: Callable[[Mapping[str, Any]], dict[str, Any]] = no_recipe
    convert: Callable[[StateDict], StateDict] = unchanged
    sampled: Callable[[StateDict], StateDict] = unchanged
    latent_settings_of: Callable[[StateDict], Mapping[str, Any]] = no_latent_settings
    has_files_beside: bool = False
    recommended: Mapping[str, Mapping[str, Any]] = {}
    labels: str = LABELS


def weights_of(family: Family) -> FamilyWeights:
    """Import how a family reads weights."""
    return family.part("weights").WEIGHTS


def reference_state(spec: ModelSpec, state: StateDict) -> StateDict:
    """Return the entries of a file under the names of the reference network."""
    return weights_of(spec.family).convert(state)
