"""`ModelSpec`: a network as data. `FamilyWeights`: how a family reads weights."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isqrt
from typing import Any, NamedTuple

from torch import Tensor, nn

from accel.families import Defaults, Family
from accel.tensors.shapes import Shapes, shapes_only

StateDict = dict[str, Tensor]
LABELS = "y_embedder.embedding_table.weight"  # the label table of most families


@dataclass(frozen=True)
class ModelSpec:
    """A network as data.

    model: a name such as DiT-XL/2, or DiT-2x96/2 for a size without a name. network(input_size=,
    num_classes=, class_dropout_prob=, **arguments): builds the reference network.
    """

    family: Family
    model: str
    network: Callable[..., nn.Module]
    arguments: Mapping[str, Any]
    num_heads: int
    # The module's own function (t, dim) → (N, dim), if it is not the reference network's.
    timestep_embedding: Callable[[Tensor, int], Tensor] | None = None
    assumes_heads: bool = False  # no file specifies num_heads: assumed from the model of this size
    default_heads: bool = True  # whether the named model of this size has this number of heads
    # Arguments that change the function, and that neither tensors nor the model's name imply.
    facts: Mapping[str, Any] = field(default_factory=dict)
    in_channels: int = 0
    patch_size: int = 0
    num_classes: int = 0
    null_class: bool = True  # whether the last row of the label table is the null class
    learn_sigma: bool = True
    latent_size: int | None = None  # side of the training latents, if known
    image_size: int | None = None  # side of the training pictures, if the file specifies it
    vae: str | None = None
    class_names: tuple[str, ...] = ()
    # Option → value recommended for sampling.
    recommended: Mapping[str, Any] = field(default_factory=dict)
    specified_in: str = ""  # the file that recommends them, if it is a separate file
    # Scale of the training latents, and whether they are normalised.
    latent_settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def defaults(self) -> Defaults:
        """Return the defaults of the model, or of its family, for these latents."""
        defaults = self.family.defaults_of(self.model)
        if self.family.defaults_for is None:
            return defaults
        return self.family.defaults_for(defaults, self.in_channels, self.latent_size)

    @property
    def out_channels(self) -> int:
        """Return the number of output channels."""
        return 2 * self.in_channels if self.learn_sigma else self.in_channels

    @property
    def trained_side(self) -> int:
        """Return the side of the training latents. Every module has one."""
        assert self.latent_size is not None
        return self.latent_size

    def empty(self, latent_size: int | None = None) -> nn.Module:
        """Build the reference network on the meta device: shapes without values. latent_size:
        default: the trained one.
        """
        side = latent_size or self.latent_size
        sizes = dict(num_classes=self.num_classes, class_dropout_prob=0.1 * self.null_class)
        sizes |= dict(input_size=side) if side else {}
        with shapes_only():
            model: Any = self.network(**{**self.arguments, **sizes})
        if self.timestep_embedding is not None:
            model.t_embedder.timestep_embedding = self.timestep_embedding
        return model

    def digest(self, of_tensors: str) -> str:
        """Return a hash of the network's function, 16 hex digits. of_tensors: its tensors' hash."""
        extra = [f"{name} {value}" for name, value in sorted(self.facts.items())]
        if not self.default_heads:
            extra.insert(0, f"{self.num_heads} heads")
        text = " ".join([of_tensors, *extra])
        return hashlib.sha256(text.encode()).hexdigest()[:16] if extra else of_tensors


def common_fields(
    shapes: Shapes, facts: Mapping[str, Any], patch_size: int, labels: str = LABELS
) -> dict[str, Any]:
    """Return the fields of ModelSpec that a family's `identify` takes from the label table, the
    position table and the facts, as for any other family. labels: name of the label table.
    """
    rows = shapes[labels][0]
    classes = facts.get("num_classes", max(rows - 1, 1))
    table = shapes.get("pos_embed", ())
    recipe = {**facts.get("recipe", {}), "guidance_channels": facts.get("guidance_channels")}
    latents = {name: recipe.pop(name) for name in list(recipe) if name.startswith("latent_")}
    return dict(
        patch_size=patch_size,
        num_classes=classes,
        null_class=rows > classes,
        latent_size=isqrt(table[1]) * patch_size if len(table) == 3 else None,
        image_size=facts.get("image_size"),
        vae=facts.get("vae"),
        class_names=tuple(facts.get("class_names", ())),
        recommended={
            name: tuple(value) if isinstance(value, list) else value
            for name, value in recipe.items()
            if value is not None
        },
        specified_in=facts.get("specified_in", ""),
        latent_settings={**latents, **facts.get("latent_statistics", {})},
    )


# ---- How a family reads weights ----


def unchanged(value: Any) -> Any:
    """Return the value unchanged."""
    return value


class CallAdapter(NamedTuple):
    """A module and its calling convention. The defaults are models.DiT's.

    inputs(x, t, y): the module's positional and keyword arguments. output(out): converts the
    module's output to the reference network's, (N, C', H, W). forward, forward_with_cfg(method,
    *arguments, **keywords): call an accelerated copy with the module's signature; `method` is the
    copy's method with models.DiT's signature. renamed(state): renames the module's state dict to
    the names in the family's files. imitates, attributes: the `__class__` and further attributes
    of an accelerated copy, for pipelines.
    """

    module: Any
    inputs: Callable[..., tuple[tuple, dict]] = lambda x, t, y: ((x, t, y), {})
    output: Callable[[Any], Tensor] = unchanged
    forward: Callable[..., Any] = lambda method, *inputs, **named: method(*inputs, **named)
    forward_with_cfg: Callable[..., Any] = lambda method, *inputs, **named: method(*inputs, **named)
    renamed: Callable[[StateDict], StateDict] = unchanged
    imitates: type | None = None
    attributes: Mapping[str, Any] = {}


def with_heads(module: Any, state: StateDict) -> tuple[dict[str, Any], CallAdapter]:
    """Return the number of heads of a module with models.DiT's signature."""
    return {"num_heads": module.num_heads}, CallAdapter(module)


class FamilyWeights(NamedTuple):
    """The functions by which a family reads weights.

    models: name → constructor of the reference network. identify(shapes, facts): returns the spec
    of weights with these shapes; raises KeyError for a missing entry, ValueError for unsupported
    weights. of_module(module, state): returns the facts that no tensor implies, such as num_heads,
    and the call adapter.
    arguments: each argument of the family's training program, its process and its constructor → a
    tuple of supported values, or the name of the fact that it sets, or None if it does not affect
    sampling. recipe(facts, name): returns recommended settings; name: of the file, without suffix.
    convert: renames and converts a file's entries to the reference network's. sampled: drops a
    file's entries that sampling does not need. has_yaml_file: whether the training program writes
    its arguments to a YAML file next to the weights. labels: name of the label table.
    """

    models: Mapping[str, Callable[..., nn.Module]]
    identify: Callable[[Shapes, Mapping[str, Any]], ModelSpec]
    of_module: Callable[[Any, StateDict], tuple[dict[str, Any], CallAdapter]] = with_heads
    arguments: Mapping[str, tuple | str | None] = {}
    recipe: Callable[[Mapping[str, Any], str], Mapping[str, Any]] = lambda facts, name: {}
    convert: Callable[[StateDict], StateDict] = unchanged
    sampled: Callable[[StateDict], StateDict] = unchanged
    has_yaml_file: bool = False
    labels: str = LABELS
