"""Identify weights: their family, sizes and facts, from the shapes of their tensors and the facts
beside them, by asking the families.

What a file says is believed, or refused by name. What it does not say is assumed, and
printed with the flag that changes it. `--model` decides wherever the entries allow it.
"""

import re
from collections.abc import Mapping
from itertools import chain
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

from accel.errors import Given, UnsaidError, UsageError, shown
from accel.families import Family, families, family_of
from accel.families.spec import ModelSpec, StateDict, weights_of
from accel.tensors.computed import UNCLEAR, require_computed
from accel.tensors.shapes import Shapes, require_fit, shapes_of


class Claim(NamedTuple):
    """Evidence that weights belong to one of some families."""

    text: str
    families: tuple[Family, ...]
    certain: bool = False  # whether the weights have entries that no other family has


class Hints(NamedTuple):
    """A user's hints about weights, and the network that they guide, if any."""

    model: str | None = None
    num_classes: int | None = None
    num_heads: int | None = None
    guided: ModelSpec | None = None


NO_HINTS = Hints()


def identify(
    given: Given, state: StateDict, facts: Mapping[str, Any], hints: Hints = NO_HINTS
) -> ModelSpec:
    """Return the spec of weights with the entries `state`, under the names of their family's files.
    Print every assumption. facts: checked, that come with the tensors. Raises UsageError for
    weights of no family or of another model, and for contradictions.
    """
    have = shapes_of(state)
    model = hints.model
    shipped = shipped_as(given.name)
    if hints.num_heads is not None:
        facts = {"num_heads": hints.num_heads, **facts}
    family, assumed = choose_family(given, have, facts, hints, shipped)
    weights = weights_of(family)
    try:
        arguments = _not_overruled(facts, family) if model else facts
        unclear = require_computed(arguments, family.prediction, weights.computed)
        spec = weights.identify(have, facts)
        rows = have[weights.labels][0]
        reference = weights.convert(state)
    except KeyError as missing:
        raise given.error(f"is not a {family.name}: no {missing.args[0]}") from None
    except UnsaidError as error:
        raise given.error(str(error), given.give(error.option)) from None
    except ValueError as error:
        raise given.error(str(error)) from None
    if unclear:
        given.warn(f"says {shown(', '.join(unclear), 300)}, {UNCLEAR}")
    classes, null_class = _classes(given, spec, rows, facts, hints, shipped)
    spec = spec.changed(num_classes=classes, null_class=null_class)
    network: Any = spec.empty()
    require_fit(given.error, reference, network)
    learn_sigma = network.out_channels == 2 * network.in_channels
    table = reference.get("pos_embed")
    spec = spec.changed(
        in_channels=network.in_channels,
        patch_size=network.patch_size,
        learn_sigma=learn_sigma,
        latent_size=isqrt(table.shape[1]) * network.patch_size if table is not None else None,
        image_size=facts.get("image_size"),
        vae=facts.get("vae"),
        class_names=tuple(facts.get("class_names", ())),
        says={**spec.says, **_says(facts)},
        latent_settings=_latent_settings(facts),
    )
    _require_estimate(given, spec, facts)
    if hints.num_heads not in (None, spec.num_heads):
        raise UsageError(
            f"these weights have {spec.num_heads}",
            "drop it",
            parameter="num_heads",
            value=hints.num_heads,
        )
    _require_model(given, spec, model)
    _say_what_is_assumed(given, spec, facts, hints, rows, assumed, shipped)
    return spec


def _require_estimate(given: Given, spec: ModelSpec, facts: Mapping[str, Any]) -> None:
    """Raise UsageError for outputs that are not sampled, or that contradict the facts."""
    last = f"its last layer makes {spec.out_channels} channels"
    if facts.get("learn_sigma") is (not spec.learn_sigma):
        raise given.error(
            f"says learn_sigma {facts['learn_sigma']}, and {last} of {spec.in_channels}",
            "save it again without that entry",
        )
    if spec.family.prediction == "data" and spec.learn_sigma:
        raise given.error(
            f"{last}, and an estimate of the clean picture has {spec.in_channels}",
            "nothing else is sampled",
        )
    fixed = spec.family.prediction == "noise" and not spec.learn_sigma
    if fixed and facts.get("sigma_small"):
        raise given.error(
            f"was trained with sigma_small {shown(facts['sigma_small'])} and without a learned "
            "variance, and only sigma_small False is sampled"
        )


def _require_model(given: Given, spec: ModelSpec, model: str | None) -> None:
    """Raise UsageError for weights of another named model than the user's."""
    if model in (None, spec.model):
        return
    if spec.model in spec.family.models:
        raise given.error(
            f"holds the weights of {spec.model}, not of {model}", f"use `model={spec.model}`"
        )
    given.warn(f"holds the weights of {spec.model}; `model={model}` says the family alone")


def _say_what_is_assumed(
    given: Given,
    spec: ModelSpec,
    facts: Mapping[str, Any],
    hints: Hints,
    rows: int,
    assumed: bool,
    shipped: str | None,
) -> None:
    """Print what neither the file nor the user says. assumed: whether that is the family."""
    family = spec.family
    if assumed:
        others = " or ".join(_models_alike(spec, given))
        given.warn(
            f"names no family, taken for a {family.name} ({family.prediction}); if it is not: "
            f"{others}"
        )
    of_file = facts.get("model")
    in_training = family.names_in_training.get(spec.model, spec.model)
    named = spec.model in (hints.model, shipped) or of_file in (spec.model, in_training)
    if not named and any(each.has_model(of_file) for each in families()):
        given.warn(f"says model {of_file}, and its entries are of {spec.model}")
    if spec.assumes_heads and not named:
        given.warn(
            f"says no number of heads, taken for {spec.num_heads}, as models of its depth and "
            f"width have; if it has others: {given.otherwise('num_heads', 'N')}"
        )
    usual = family.models.get(spec.model, family.recipe).num_classes
    as_usual = spec.num_classes in (1000, usual) and named
    if hints.num_classes is None and "num_classes" not in facts and not as_usual:
        if hints.guided is not None:
            return  # it has the classes of the network that it guides
        classes = spec.num_classes
        words = f"{classes} classes and the null class (all {rows} classes? `num_classes={rows}`)"
        given.warn(words if spec.null_class else "one class and no null class")


def _not_overruled(facts, family):
    """Return the facts without arguments by which files say that they are of families with
    another prediction: the user's model goes before them.
    """
    others = [each for each in families() if each.prediction != family.prediction]
    overruled = {name for each in others for name in each.trained_by(facts)}
    return {name: value for name, value in facts.items() if name not in overruled}


def _says(facts):
    """Return the values of options that the facts name."""
    says = {**facts.get("recipe", {}), "guidance_channels": facts.get("guidance_channels")}
    if "guidance_interval" in says:
        says["guidance_interval"] = tuple(says["guidance_interval"])
    return {
        name: value
        for name, value in says.items()
        if value is not None and not name.startswith("latent_")
    }


def _latent_settings(facts):
    """Return the settings of latents that the facts name."""
    names = "latent_scale", "latent_norm"
    recipe = facts.get("recipe", {})
    return {name: recipe[name] for name in names if name in recipe}


# ---- The family ----


def choose_family(
    given: Given,
    have: Shapes,
    facts: Mapping[str, Any],
    hints: Hints = NO_HINTS,
    shipped: str | None = None,
) -> tuple[Family, bool]:
    """Return the family of weights with the shapes `have`, and whether it is an assumption that is
    not printed yet: several families have these entries, and nothing names one. shipped: the model
    of a file that this program ships or fetches. Raises UsageError as `identify` does.
    """
    alike = families_with(have)
    wanted = family_of(hints.model) if hints.model else None
    if not alike:
        likely = wanted or families()[0]
        missing = next(key for key in likely.keys if key not in have)
        others = " or ".join(f"a {family.name}" for family in families() if family != likely)
        raise given.error(f"is not a {likely.name}: no {missing}", f"nor is it {others}")
    claims = _claims(given, alike, have, facts, shipped)
    if wanted:
        _require_allowed(given, wanted, hints.model, alike, claims)
        return wanted, False
    possible = alike
    for claim in claims:
        possible = [family for family in possible if family in claim.families]
        if not possible:
            other = next(each for each in claims if claim.families[0] not in each.families)
            raise given.error(
                f"says {other.text}, as a {other.families[0].name} does, and {claim.text}, as a "
                f"{claim.families[0].name} does",
                given.give("model"),
            )
    if not claims and hints.guided is not None and hints.guided.family in alike:
        family = hints.guided.family
        if len(alike) > 1:
            words = f"taken for a {family.name}, as the network that it guides"
            given.warn(f"names no family, {words}")
        return family, False
    if not claims:
        return _by_file_name(given.name, alike), len(alike) > 1
    # Several train models of one name; it is the family's whose own models are called so.
    first = str(facts.get("model") or shipped).partition("-")[0]
    owners = [
        each for each in possible if any(name.startswith(f"{first}-") for name in each.models)
    ]
    return (owners or possible)[0], False


def _claims(given, alike, have, facts, shipped):
    """Return the claims of weights whose entries the families `alike` have, those of the
    entries first.
    """
    family_name = facts.get("family")
    if family_name:  # this program wrote it
        owners = tuple(family for family in alike if family.name == family_name)
        if not owners:
            raise given.error(
                f"says family {shown(family_name)}, and its entries are of "
                f"{' or '.join(family.name for family in alike)}",
                "save it again",
            )
        return [Claim(f"family {family_name}", owners)]
    claims = []
    for family in alike:
        claims += [Claim(name, (family,), certain=True) for name in family.claims(have)]
        claims += [
            Claim(f"{name} {shown(facts[name])}", (family,)) for name in family.trained_by(facts)
        ]
    claims.sort(key=lambda claim: not claim.certain)
    for name in (facts.get("model"), shipped):
        owners = tuple(family for family in alike if family.calls_models_as(name))
        if name == shipped:
            owners = tuple(family for family in alike if name in family.models)
        if owners:
            claims.append(Claim(f"model {name}", owners))
    return claims


def _require_allowed(given, wanted, model, alike, claims):
    """Raise UsageError unless the entries of weights allow the family that the user wants.
    Print what else the file says.
    """
    if wanted not in alike:
        raise given.error(f"is not a {wanted.name} but a {alike[0].name}", "drop `model`")
    claim = next((claim for claim in claims if wanted not in claim.families), None)
    if claim is None:
        return
    if claim.certain:
        raise given.error(
            f"was trained as a {claim.families[0].name} ({claim.text}), not as {model}",
            "drop `model`",
        )
    given.warn(
        f"says {claim.text}, as a {claim.families[0].name} does; taken for a {wanted.name}, as "
        "`model` says"
    )


def _by_file_name(name, alike):
    """Return the family whose name is the first word of the file's name, as in published
    files; else the first family.
    """
    file = name.replace("\\", "/").rpartition("/")[2]
    for family in alike:
        if re.match(rf"{re.escape(family.name)}(\b|[-_])", file, re.IGNORECASE):
            return family
    return alike[0]


def _models_alike(spec, given):
    """Return the flag for each other family with these entries: its model of the same size, of an
    unusual size its first model.
    """
    size = spec.model.removeprefix(spec.family.name)
    others = [family.models for family in families_with_keys_of(spec.family)]
    models = [min(names, key=lambda name: not name.endswith(size)) for names in others]
    return [given.otherwise("model", name) for name in models]


def families_with(have: Shapes) -> list[Family]:
    """Return the families whose keys are all in `have`; of them those with the most."""
    having = [family for family in families() if have.keys() >= {*family.keys}]
    most = max((len(family.keys) for family in having), default=0)
    return [family for family in having if len(family.keys) == most]


def families_with_keys_of(family: Family) -> list[Family]:
    """Return the other families whose files have the same keys."""
    return [each for each in families() if each != family and {*each.keys} == {*family.keys}]


# ---- Classes ----


def _classes(given, spec, rows, facts, hints, shipped):
    """Return (number of classes, whether a null class follows them), from the rows of the
    label table.
    """
    wanted = hints.num_classes
    implied = spec.family.models.get(spec.model, spec.family.recipe)
    certain = implied.num_classes if shipped or implied.class_names else None
    certain = facts.get("num_classes", certain)
    if wanted == rows and certain == rows - 1:
        raise UsageError(
            f"{given.name} has {certain} classes, and its label table one more row for no class",
            "drop `num_classes`",
            parameter="num_classes",
            value=wanted,
        )
    of_guided = hints.guided and hints.guided.num_classes
    if of_guided and "num_classes" not in facts and rows in (of_guided, of_guided + 1):
        wanted = of_guided
        if rows == of_guided:
            given.warn(
                f"has a label table of {rows} rows, taken for {rows} classes and no null class, as "
                "the network that it guides has so many classes"
            )
    classes = facts.get("num_classes", max(rows - 1, 1)) if wanted is None else wanted
    if rows in (classes, classes + 1):
        return classes, rows == classes + 1
    if wanted is None:
        remedy = "give `num_classes`" if given.option == "ckpt" else "save it again"
        raise given.error(
            f"says num_classes {classes}, and its label table has {rows} rows", remedy
        )
    raise UsageError(
        f"the label table in {given.name} has {rows} rows, one for each class and one for no class",
        f"use `num_classes={max(rows - 1, 1)}`",
        parameter="num_classes",
        value=wanted,
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
