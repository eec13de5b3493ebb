"""Recognise the family and sizes of weights from their shapes and metadata, by asking
each family's folder.

A family's weights.py has

    MODELS                         name of a model → constructor of the reference network
    KEYS                           names of tensors that every file of the family has; if a file has
                                   those of several
                                   families, it is of the one with the most
    LABELS                         the label table's name
    sizes(shapes, metadata)        (name, constructor, heads); raises KeyError for a missing entry,
                                   ValueError for
                                   unsupported weights
    of_module(module, state)       OfModule, the rules to read a module of the family, or None
                                   (loaded_module.py)

and, if the family differs from the default,

    claim(shapes, metadata)        (strength, reason) if other entries or metadata prove the family,
                                   or None
    converted(state, metadata)     state dict of the file → state dict of the reference network;
                                   default: unchanged
    sampled(state, metadata)       the entries of a file that sampling needs, under its names;
                                   default: unchanged
    recipe(model, metadata, path)  values of settings that a file at `path` implies
"""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from math import isqrt
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from accel.errors import UsageError, shown
from accel.families import Family, families, family_of
from accel.weights import positions
from accel.weights.checkpoint import Checkpoint, pretrained_models
from accel.weights.shapes import Shapes, require_fit, shapes_of, shapes_only

# Strength of a claim: tensors or arguments that only this family's training leaves count
# more than a model's name.
STRUCTURE = 2
NAMED = 1
EXPLICIT = 3  # the family's name in metadata that this program wrote

Sizes = tuple[str, Callable[..., torch.nn.Module], int]  # name, constructor and heads of a model


class Fit(NamedTuple):
    """The family and sizes of weights, and the facts that come with the tensors."""

    family: Family
    model: str  # the model's name; a model without a name is called by its sizes: DiT-2x96/2
    build: Callable[..., torch.nn.Module]  # (input_size=, num_classes=) → the reference network
    num_heads: int
    in_channels: int
    patch_size: int
    num_classes: int
    # whether the label table ends with a row for the unconditional estimate
    null_class: bool = True
    learn_sigma: bool = True
    latent_size: int | None = None  # side of the training latents, if known
    image_size: int | None = None  # side of the training pictures in pixels, if known
    vae: str | None = None
    class_names: tuple[str, ...] = ()
    # values of settings that these weights imply, not their family
    recipe: Mapping[str, Any] = MappingProxyType({})
    schedule: dict | None = None  # a pipeline's scheduler configuration
    usual: bool = True  # whether shapes and family imply the number of heads

    def trained_size(self, factor: int) -> int | None:
        """Return the side of the training pictures in pixels, or None. factor: a
        picture's side / its latent's side.
        """
        return factor * self.latent_size if self.latent_size else self.image_size

    def empty(self, latent_size: int) -> torch.nn.Module:
        """Return the reference network for latents of this side, on the meta device:
        shapes without values.
        """
        with shapes_only():
            return self.build(input_size=latent_size, num_classes=self.num_classes)

    def metadata(self) -> dict[str, Any]:
        """Return the facts to write into a file of these weights, by their names in
        weights/metadata.py.
        """
        facts = {
            "family": self.family.name,
            "prediction": self.family.prediction,
            "model": self.model if self.model in self.family.models else None,
            "num_classes": self.num_classes,
            "num_heads": self.num_heads,
            "image_size": self.image_size,
            "vae": self.vae if self.vae in ("ema", "mse") else None,  # else a path of this machine
            "class_names": list(self.class_names) or None,
            "guidance_channels": self.recipe.get("guidance_channels"),
            "recipe": {
                name: value for name, value in self.recipe.items() if name != "guidance_channels"
            }
            or None,
        }
        return {name: value for name, value in facts.items() if value is not None}


def recognise(
    source: str,
    state: dict[str, torch.Tensor],
    metadata: dict[str, Any],
    model: str | None = None,
    num_classes: int | None = None,
    shipped_as: str | None = None,
) -> Fit:
    """Return the family, sizes and facts of the weights `state`. Print every assumption.

    source: the user's name for the weights. metadata: checked entries that come with the
    tensors. model, num_classes: the user's options. shipped_as: the model of a file that
    this program ships or fetches. Raises UsageError for weights of no family or of
    another model, and for contradictions.
    """
    have = shapes_of(state)
    family, assumed = choose_family(source, have, metadata, model, shipped_as)
    weights = family.part("weights")
    try:
        name, build, heads = weights.sizes(have, metadata)
        standard = name in family.models and weights.sizes(have, {})[2] == heads
        rows = have[weights.LABELS][0]
        state = ask(family, "converted", state, metadata)
    except KeyError as missing:
        raise UsageError(f"`ckpt={source}`: is not a {family.name}: no {missing.args[0]}") from None
    except ValueError as error:
        raise UsageError(f"`ckpt={source}`: {error}") from None
    classes, null_class = _classes(source, rows, metadata, num_classes)
    build = partial(build, class_dropout_prob=0.1 if null_class else 0.0)
    with shapes_only():
        network = build(num_classes=classes)
    require_fit(f"`ckpt={source}`", state, network)
    if model not in (None, name):
        raise UsageError(
            f"`ckpt={source}`: holds the weights of {name}, not of {model}; use `model={name}`"
        )
    if assumed:
        _say_what_is_assumed(source, family, have, metadata)
    usual = family.models.get(name, family.recipe).num_classes
    if num_classes is None and "num_classes" not in metadata and classes not in (1000, usual):
        print(
            f"{shown(source, 300)}: {classes} classes and the null class (all {rows} classes? "
            f"--num-classes {rows})"
        )
    table = state.get("pos_embed")
    schedule = metadata.get("schedule")
    facts = dict(
        learn_sigma=network.out_channels == 2 * network.in_channels,
        latent_size=isqrt(table.shape[1]) * network.patch_size if table is not None else None,
        class_names=tuple(metadata.get("class_names", ())),
        recipe=_recipe(metadata),
        usual=standard,
        image_size=metadata.get("image_size"),
        vae=metadata.get("vae"),
        # else an argument of a training run
        schedule=schedule if isinstance(schedule, dict) else None,
    )
    return Fit(
        family,
        name,
        build,
        heads,
        network.in_channels,
        network.patch_size,
        classes,
        null_class,
        **facts,
    )


def _recipe(metadata):
    """Return the values of settings that the metadata of a file name."""
    found = {**metadata.get("recipe", {}), "guidance_channels": metadata.get("guidance_channels")}
    if "guidance_interval" in found:
        found["guidance_interval"] = tuple(found["guidance_interval"])
    return {name: value for name, value in found.items() if value is not None}


def reference_state(weights: Any, fit: Fit) -> dict[str, torch.Tensor]:
    """Return the tensors of `weights`, a Checkpoint or a LoadedModule, under the names of
    their reference network.
    """
    return ask(fit.family, "converted", weights.state, weights.metadata)


_DEFAULTS = {
    "claim": lambda shapes, metadata: None,
    "converted": lambda state, metadata: state,
    "sampled": lambda state, metadata: state,
    "recipe": lambda model, metadata, path: {},
}


def ask(family: Family, function: str, *arguments: Any) -> Any:
    """Call an optional function of a family's weights.py, or its default."""
    return getattr(family.part("weights"), function, _DEFAULTS[function])(*arguments)


def choose_family(
    source: str, have: Shapes, metadata: dict[str, Any], model: str | None, shipped_as: str | None
) -> tuple[Family, bool]:
    """Return the family of weights with the shapes `have`, and whether it is an
    assumption: several families have these entries, and nothing names one. Other
    arguments: as for `recognise`. Raises UsageError as `recognise` does.
    """
    alike = families_with(have)
    wanted = family_of(model) if model else None
    if not alike:
        likely = wanted or families()[0]
        missing = next(key for key in likely.part("weights").KEYS if key not in have)
        others = " or ".join(f"a {family.name}" for family in families() if family != likely)
        raise UsageError(
            f"`ckpt={source}`: is not a {likely.name}: no {missing}; nor is it {others}"
        )
    claims = [
        (*claim, family) for family in alike if (claim := ask(family, "claim", have, metadata))
    ]
    for name in (metadata.get("model"), shipped_as):
        claims += [(NAMED, f"model {name}", family) for family in alike if name in family.models]
    claims += [
        (EXPLICIT, f"family {family.name}", family)
        for family in alike
        if metadata.get("family") == family.name
    ]
    if "family" in metadata and metadata["family"] not in [family.name for family in alike]:
        raise UsageError(
            f"`ckpt={source}`: says family {shown(metadata['family'])}, and its entries are of "
            f"{' or '.join(family.name for family in alike)}; save it again"
        )
    if claims:
        strength, reason, family = max(claims, key=lambda claim: claim[0])
        for other_strength, other_reason, other in claims:
            if other != family and other_strength >= STRUCTURE:
                raise UsageError(
                    f"`ckpt={source}`: says {reason}, and has {other_reason}; save it again"
                )
        if wanted not in (None, family):
            raise UsageError(
                f"`ckpt={source}`: was trained as a {family.name} ({reason}), not as {model}; "
                "drop `model`"
            )
        return family, False
    if wanted in alike:
        return wanted, False
    if wanted:
        raise UsageError(
            f"`ckpt={source}`: is not a {wanted.name} but a {alike[0].name}; drop `model`"
        )
    return _by_file_name(source, alike) or alike[0], len(alike) > 1


def _by_file_name(source, alike):
    """Return the family whose name is the first word of the file's name, as in published
    files, or None.
    """
    file = source.replace("\\", "/").rpartition("/")[2].lower()
    return next(
        (
            family
            for family in alike
            if re.match(rf"{re.escape(family.name.lower())}(\b|[-_])", file)
        ),
        None,
    )


def _say_what_is_assumed(source, family, have, metadata):
    """Print the assumed family of weights, and the flag for each other candidate."""
    others = []
    for other in families_with(have):
        with suppress(ValueError):
            name = other.part("weights").sizes(have, metadata)[0]
            others += [f"--model {name}"] if name in other.models and other != family else []
    remedy = f"; if it is not: {' or '.join(others)}" if others else ""
    print(
        f"{shown(source, 300)}: names no family, taken for a {family.name} "
        f"({family.prediction}){remedy}"
    )


def families_with(have: Shapes) -> list[Family]:
    """Return the families whose KEYS are all in `have`; of them those with the most."""
    found = [family for family in families() if have.keys() >= set(family.part("weights").KEYS)]
    most = max((len(family.part("weights").KEYS) for family in found), default=0)
    return [family for family in found if len(family.part("weights").KEYS) == most]


def _classes(source, rows, metadata, wanted):
    """Return (number of classes, whether a null class follows them), from the rows of the
    label table.
    """
    classes = metadata.get("num_classes", max(rows - 1, 1)) if wanted is None else wanted
    if rows in (classes, classes + 1):
        return classes, rows == classes + 1
    if wanted is None:
        raise UsageError(
            f"`ckpt={source}`: says num_classes {classes}, and its label table has {rows} rows; "
            "give `num_classes`"
        )
    raise UsageError(
        f"`num_classes={wanted}`: the label table in {source} has {rows} rows, one for each class "
        f"and one for no class; use `num_classes={max(rows - 1, 1)}`"
    )


def require_sinusoid(source: str, table: torch.Tensor, remedy: str) -> float:
    """Return how far a position table (1, T, D) is from the sine-cosine table of its
    grid. Raises UsageError, with `remedy`, for more than the rounding of a moving
    average: a table that was trained is no function of the grid.
    """
    off = positions.distance(table)
    rounding = positions.rounding(table)
    if off > rounding:
        raise UsageError(
            f"`ckpt={source}`: its position table is up to {off:.2g} off the sine-cosine table of "
            f"its grid, more than the rounding of an average ({rounding:.1g}); {remedy}"
        )
    return off


def find_model(name_or_path: str | Path) -> dict[str, torch.Tensor]:
    """Return a state dict under the names of its family's reference network, as
    upstream's function of this name does; weights of no family are returned unchanged.
    name_or_path: as for Checkpoint. Raises UsageError.
    """
    checkpoint = Checkpoint(name_or_path)
    state = checkpoint.state
    shapes = shapes_of(checkpoint.state)
    if not families_with(shapes):
        return state
    family, _ = choose_family(checkpoint.name, shapes, checkpoint.metadata, None, None)
    return ask(family, "converted", state, checkpoint.metadata)


def download_model(name: str) -> dict[str, torch.Tensor]:
    """Return the state dict of published weights, as upstream's function of this name
    does. Download them on first use. Raises UsageError for another name.
    """
    if name not in pretrained_models:
        raise UsageError(
            f"`ckpt={name}`: not published; the names are {', '.join(sorted(pretrained_models))}"
        )
    return find_model(name)


def published_name(model: str, image_size: int, num_classes: int) -> str:
    """Return the name of a model's published weights for a size in pixels. Raises
    UsageError if there are none.
    """
    family = family_of(model)
    implied = family.models[model]
    if image_size in implied.published and num_classes == implied.num_classes:
        return implied.published[image_size]
    if family.fetch:
        raise UsageError(
            f"`ckpt`: {model} needs a file; the family's are fetched by: {family.fetch}"
        )
    there = [(name, sorted(one.published)) for name, one in family.models.items() if one.published]
    known = "".join(
        f" (there are {name} at {' and '.join(map(str, sizes))})" for name, sizes in there
    )
    raise UsageError(
        f"`ckpt`: no published weights for {model} at {image_size} px with {num_classes} "
        f"classes{known}; give a file or a folder"
    )
