"""Recognise the family and sizes of weights from their shapes and metadata, by asking each
family's Recogniser.

What a file says is believed, or refused by name. What it does not say is assumed, and
printed with the flag that changes it. `--model` decides wherever the entries allow it.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from math import isqrt
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from accel.errors import UsageError, shown
from accel.families import Defaults, Family, families, family_of
from accel.weights import Weights
from accel.weights.computed import require_computed
from accel.weights.shapes import Shapes, require_fit, shapes_of, shapes_only

log = logging.getLogger(__name__)


class Claim(NamedTuple):
    """Evidence that weights belong to one of some families."""

    text: str
    families: tuple[Family, ...]
    certain: bool = False  # whether the weights have entries that no other family has


class Recipe(NamedTuple):
    """How a file says that its weights are sampled."""

    options: Mapping[str, Any]  # values of settings
    notices: tuple[str, ...] = ()  # lines to print if they are used


# Strength of a claim to a module: entries or attributes count more than the class's name.
STRUCTURE = 2
NAMED = 1


class OfModule(NamedTuple):
    """The rules to read, call and replace a module of a family. The defaults are for models.DiT."""

    family: Family
    metadata: dict[str, Any]  # facts that no tensor holds, such as num_heads
    latent_size: int | None = None  # side of the latent; None: that of its position table
    strength: int = 0  # if several families recognise a module, the strongest claim wins
    assumed: str = ""  # what neither the class nor the entries say, and how to say it
    # renames the entries of its state dict as in the family's files
    read: Callable[[dict], dict] = dict
    # x, t, y of the reference network → its own
    arguments: Callable[..., tuple] = lambda x, t, y: ((x, t, y), {})
    output: Callable[[Any], torch.Tensor] = lambda out: (
        out
    )  # its own output → the reference network's
    # replaces the reference network's
    timestep_embedding: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    # a mixin over accelerated.Accelerated: the signature of the accelerated copy
    face: type | None = None


class Recogniser:
    """Recognise and read the files and modules of a family. Each family's weights.py has a
    subclass and its instance, RECOGNISER.

    family: its record; models: name → constructor of the reference network; labels: name of
    the label table; computed: arguments that only the family's code has → their computed values.
    """

    family: Family
    models: Mapping[str, Callable[..., torch.nn.Module]]
    labels: str = "y_embedder.embedding_table.weight"
    computed: Mapping[str, tuple] = MappingProxyType({})

    def form(self, shapes: Shapes, metadata: Mapping[str, Any]) -> "Fit":
        """Return the network of weights with these shapes; `recognise` adds the rest.

        Raises KeyError for a missing entry, ValueError for unsupported weights.
        """
        raise NotImplementedError

    def of_module(self, module: torch.nn.Module, state: dict[str, torch.Tensor]) -> OfModule | None:
        """Return the rules to read a module of the family, or None for another."""
        raise NotImplementedError

    def converted(
        self, state: dict[str, torch.Tensor], metadata: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return the state dict of the reference network from that of a file."""
        return state

    def sampled(
        self, state: dict[str, torch.Tensor], metadata: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return the entries of a file that sampling needs, under its names."""
        return state

    def recipe(self, fit: "Fit", metadata: Mapping[str, Any], path: Path) -> Recipe:
        """Return the settings that a file at `path` implies. fit: its sizes."""
        return Recipe({})


def recogniser_of(family: Family) -> Recogniser:
    """Import the recogniser of a family."""
    return family.part("weights").RECOGNISER


class Fit(NamedTuple):
    """The family and sizes of weights, and the facts that come with the tensors."""

    family: Family
    model: str  # the model's name; a model without a name is called by its sizes: DiT-2x96/2
    # (input_size=, num_classes=, class_dropout_prob=) → the reference network
    build: Callable[..., torch.nn.Module]
    num_heads: int
    # `recognise` fills these in.
    in_channels: int = 0
    patch_size: int = 0
    num_classes: int = 0
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
    # whether no file says the number of heads: it is that of the model of this size
    assumes_heads: bool = False
    usual: bool = True  # whether the model of this size has this number of heads
    # that decide its function and follow neither from tensors nor from the model's name
    facts: Mapping[str, Any] = MappingProxyType({})
    notices: tuple[str, ...] = ()  # lines to print if the recipe is used

    @property
    def defaults(self) -> Defaults:
        """Return the values that the model, or its family, implies for these latents."""
        defaults = self.family.models.get(self.model, self.family.recipe)
        return self.family.of_latents(defaults, self.in_channels, self.latent_size)

    @property
    def out_channels(self) -> int:
        """Return the number of channels that the network makes."""
        return 2 * self.in_channels if self.learn_sigma else self.in_channels

    def decoded(self, factor: int) -> "Fit":
        """Return this fit with the side of the training pictures, where that of their latents
        is known. factor: a picture's side / its latent's side.
        """
        if not self.latent_size:
            return self
        return self._replace(image_size=factor * self.latent_size)

    def empty(self, latent_size: int) -> torch.nn.Module:
        """Return the reference network for latents of this side, on the meta device:
        shapes without values.
        """
        with shapes_only():
            return self.build(input_size=latent_size, num_classes=self.num_classes)

    def digest(self, weights: Weights) -> str:
        """Return 16 hex digits of all that decides the network's function: the tensors of its
        weights, the number of heads where it is not that of the model of this size, and the
        family's facts.
        """
        digest = weights.digest()
        others = [f"{name} {value}" for name, value in sorted(self.facts.items())]
        if not self.usual:
            others.insert(0, f"{self.num_heads} heads")
        text = " ".join([digest, *others])
        return hashlib.sha256(text.encode()).hexdigest()[:16] if others else digest


def recognise(
    source: str,
    state: dict[str, torch.Tensor],
    metadata: dict[str, Any],
    model: str | None = None,
    num_classes: int | None = None,
    shipped_as: str | None = None,
    path: Path | None = None,
) -> Fit:
    """Return the family, sizes and facts of the weights `state`. Print every assumption.

    source: the user's name for the weights. metadata: checked entries that come with the
    tensors. model, num_classes: the user's options. shipped_as: the model of a file that
    this program ships or fetches. path: of a file, for its recipe. Raises UsageError for
    weights of no family or of another model, and for contradictions.
    """
    have = shapes_of(state)
    family, assumed = choose_family(source, have, metadata, model, shipped_as)
    recogniser = recogniser_of(family)
    try:
        arguments = _not_overruled(metadata, family) if model else metadata
        unclear = require_computed(arguments, family.prediction, recogniser.computed)
        form = recogniser.form(have, metadata)
        rows = have[recogniser.labels][0]
        state = recogniser.converted(state, metadata)
    except KeyError as missing:
        raise UsageError(f"`ckpt={source}`: is not a {family.name}: no {missing.args[0]}") from None
    except ValueError as error:
        raise UsageError(f"`ckpt={source}`: {error}") from None
    if unclear:
        log.warning(
            f"{shown(source, 300)}: says {shown(', '.join(unclear), 300)}, which is not understood "
            "here; if it changes the network, the pictures are wrong"
        )
    implied = family.models.get(form.model, family.recipe)
    certain = implied.num_classes if shipped_as or implied.class_names else None
    certain = metadata.get("num_classes", certain)
    if num_classes == rows and certain == rows - 1:
        raise UsageError(
            f"`num_classes={num_classes}`: {source} has {certain} classes, and its label table "
            "one more row for no class; drop `num_classes`"
        )
    classes, null_class = _classes(source, rows, metadata, num_classes)
    build = partial(form.build, class_dropout_prob=0.1 if null_class else 0.0)
    with shapes_only():
        network = build(num_classes=classes)
    require_fit(f"`ckpt={source}`", state, network)
    learn_sigma = network.out_channels == 2 * network.in_channels
    if metadata.get("learn_sigma") is (not learn_sigma):
        raise UsageError(
            f"`ckpt={source}`: says learn_sigma {metadata['learn_sigma']}, and its last layer "
            f"makes {network.out_channels} channels of {network.in_channels}; save it again "
            "without that entry"
        )
    if family.prediction == "data" and learn_sigma:
        raise UsageError(
            f"`ckpt={source}`: its last layer makes {network.out_channels} channels, and an "
            f"estimate of the clean picture has {network.in_channels}; nothing else is sampled"
        )
    if family.prediction == "noise" and not learn_sigma and metadata.get("sigma_small"):
        raise UsageError(
            f"`ckpt={source}`: was trained with sigma_small {shown(metadata['sigma_small'])} and "
            "without a learned variance, and only sigma_small False is sampled"
        )
    if model not in (None, form.model):
        if form.model in family.models:
            raise UsageError(
                f"`ckpt={source}`: holds the weights of {form.model}, not of {model}; use "
                f"`model={form.model}`"
            )
        log.warning(
            f"{shown(source, 300)}: holds the weights of {form.model}; --model {model} says the "
            "family alone"
        )
    if assumed:
        _say_what_is_assumed(source, family, have, form.model)
    of_file = metadata.get("model")
    in_training = family.names_in_training.get(form.model, form.model)
    named = form.model in (model, shipped_as) or of_file in (form.model, in_training)
    if not named and any(each.has_model(of_file) for each in families()):
        log.warning(
            f"{shown(source, 300)}: says model {of_file}, and its entries are of {form.model}"
        )
    if form.assumes_heads and not named:
        log.warning(
            f"{shown(source, 300)}: says no number of heads, taken for {form.num_heads}, as models "
            "of its depth and width have; if it has others: --num-heads N"
        )
    as_usual = classes in (1000, implied.num_classes) and named
    if num_classes is None and "num_classes" not in metadata and not as_usual:
        words = f"{classes} classes and the null class (all {rows} classes? --num-classes {rows})"
        if not null_class:  # a label table of one row
            words = "one class and no null class"
        log.warning(f"{shown(source, 300)}: {words}")
    table = state.get("pos_embed")
    schedule = metadata.get("schedule")
    fit = form._replace(
        build=build,
        in_channels=network.in_channels,
        patch_size=network.patch_size,
        num_classes=classes,
        null_class=null_class,
        learn_sigma=learn_sigma,
        latent_size=isqrt(table.shape[1]) * network.patch_size if table is not None else None,
        image_size=metadata.get("image_size"),
        vae=metadata.get("vae"),
        class_names=tuple(metadata.get("class_names", ())),
        recipe={**form.recipe, **_recipe(metadata)},
        # else an argument of a training run
        schedule=schedule if isinstance(schedule, dict) else None,
    )
    if path is None:
        return fit
    recipe = recogniser.recipe(fit, metadata, path)
    return fit._replace(recipe={**fit.recipe, **recipe.options}, notices=recipe.notices)


def _not_overruled(metadata, family):
    """Return the metadata without arguments by which files say that they are of families with
    another prediction: the user's model goes before them.
    """
    others = [each for each in families() if each.prediction != family.prediction]
    overruled = {name for each in others for name in each.trained_by(metadata)}
    return {name: value for name, value in metadata.items() if name not in overruled}


def _recipe(metadata):
    """Return the values of settings that the metadata of a file name."""
    recipe = {**metadata.get("recipe", {}), "guidance_channels": metadata.get("guidance_channels")}
    if "guidance_interval" in recipe:
        recipe["guidance_interval"] = tuple(recipe["guidance_interval"])
    return {name: value for name, value in recipe.items() if value is not None}


def reference_state(weights: Weights, fit: Fit) -> dict[str, torch.Tensor]:
    """Return the tensors of weights under the names of their reference network."""
    return recogniser_of(fit.family).converted(weights.state, weights.metadata)


def choose_family(
    source: str,
    have: Shapes,
    metadata: dict[str, Any],
    model: str | None,
    shipped_as: str | None,
) -> tuple[Family, bool]:
    """Return the family of weights with the shapes `have`, and whether it is an
    assumption: several families have these entries, and nothing names one. Other
    arguments: as for `recognise`. Raises UsageError as `recognise` does.
    """
    alike = families_with(have)
    wanted = family_of(model) if model else None
    if not alike:
        likely = wanted or families()[0]
        missing = next(key for key in likely.keys if key not in have)
        others = " or ".join(f"a {family.name}" for family in families() if family != likely)
        raise UsageError(
            f"`ckpt={source}`: is not a {likely.name}: no {missing}; nor is it {others}"
        )
    claims = _claims(source, alike, have, metadata, shipped_as)
    if wanted:
        _require_allowed(source, wanted, model, alike, claims)
        return wanted, False
    possible = alike
    for claim in claims:
        possible = [family for family in possible if family in claim.families]
        if not possible:
            others = [each for each in claims if claim.families[0] not in each.families]
            raise UsageError(
                f"`ckpt={source}`: says {others[0].text}, as a {others[0].families[0].name} does, "
                f"and {claim.text}, as a {claim.families[0].name} does; give `model`"
            )
    if not claims:
        return _by_file_name(source, alike), len(alike) > 1
    # Several train models of one name; it is the family's whose model is called so.
    owner = family_of(str(metadata.get("model")))
    return owner if owner in possible else possible[0], False


def _claims(source, alike, have, metadata, shipped_as):
    """Return the claims of weights whose entries the families `alike` have, those of the
    entries first.
    """
    family_name = metadata.get("family")
    if family_name:  # this program wrote it
        owners = tuple(family for family in alike if family.name == family_name)
        if not owners:
            raise UsageError(
                f"`ckpt={source}`: says family {shown(family_name)}, and its entries are of "
                f"{' or '.join(family.name for family in alike)}; save it again"
            )
        return [Claim(f"family {family_name}", owners)]
    claims = []
    for family in alike:
        claims += [Claim(name, (family,), certain=True) for name in family.claims(have)]
        claims += [
            Claim(f"{name} {shown(metadata[name])}", (family,))
            for name in family.trained_by(metadata)
        ]
    claims.sort(key=lambda claim: not claim.certain)
    for name in (metadata.get("model"), shipped_as):
        owners = tuple(family for family in alike if family.has_model(name))
        if owners:
            claims.append(Claim(f"model {name}", owners))
    return claims


def _require_allowed(source, wanted, model, alike, claims):
    """Raise UsageError unless the entries of weights allow the family that the user wants.
    Print what else the file says.
    """
    if wanted not in alike:
        raise UsageError(
            f"`ckpt={source}`: is not a {wanted.name} but a {alike[0].name}; drop `model`"
        )
    claim = next((claim for claim in claims if wanted not in claim.families), None)
    if claim is None:
        return
    if claim.certain:
        raise UsageError(
            f"`ckpt={source}`: was trained as a {claim.families[0].name} ({claim.text}), not as "
            f"{model}; drop `model`"
        )
    log.warning(
        f"{shown(source, 300)}: says {claim.text}, as a {claim.families[0].name} does; taken for "
        f"a {wanted.name}, as --model says"
    )


def _by_file_name(source, alike):
    """Return the family whose name is the first word of the file's name, as in published
    files; else the first family.
    """
    file = source.replace("\\", "/").rpartition("/")[2]
    for family in alike:
        if re.match(rf"{re.escape(family.name)}(\b|[-_])", file, re.IGNORECASE):
            return family
    return alike[0]


def _say_what_is_assumed(source, family, have, model):
    """Print the assumed family of weights, and the flag for each other candidate: its model of
    the same size, of an unusual size its first model.
    """
    size = model.removeprefix(family.name)
    others = [other.models for other in families_with(have) if other != family]
    models = [min(names, key=lambda name: not name.endswith(size)) for names in others]
    flags = " or ".join(f"--model {name}" for name in models)
    log.warning(
        f"{shown(source, 300)}: names no family, taken for a {family.name} "
        f"({family.prediction}); if it is not: {flags}"
    )


def families_with(have: Shapes) -> list[Family]:
    """Return the families whose keys are all in `have`; of them those with the most."""
    having = [family for family in families() if have.keys() >= {*family.keys}]
    most = max((len(family.keys) for family in having), default=0)
    return [family for family in having if len(family.keys) == most]


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


def shipped_as(name: str) -> str | None:
    """Return the model whose weights, shipped or published, have this name or path; None if
    there is none.
    """
    for model, defaults in chain.from_iterable(family.models.items() for family in families()):
        ships = defaults.ckpt and Path(defaults.ckpt).resolve() == Path(name).resolve()
        if ships or Path(name).name in defaults.published.values():
            return model
    return None
