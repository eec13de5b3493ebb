"""Identify a network's family and sizes from tensor shapes and metadata. Missing values are
assumed, with a notice that names the flag to override them.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from accel.errors import InputRef, UsageError, shown
from accel.families import Family, families, family_of, require_family_of
from accel.families.spec import ModelSpec, StateDict
from accel.tensors.shapes import Shapes, require_fit, shapes_of
from accel.tensors.tables import PAIRS, mean_and_deviation


class UserFacts(NamedTuple):
    """The user's options about a checkpoint, and the network that it guides, if any."""

    model: str | None = None
    num_classes: int | None = None
    num_heads: int | None = None
    guided: ModelSpec | None = None


NO_USER_FACTS = UserFacts()
# Training arguments that distinguish families with the same tensors, in this order.
TELLING_ARGUMENTS = "enc_type", "model", "path_type"


def identify(
    given: InputRef, state: StateDict, facts: Mapping[str, Any], family: Family
) -> ModelSpec:
    """Identify a network of this family from its weights.

    state: tensors under the names in the family's files. facts: validated metadata. Raises
    UsageError if tensors are missing or left over, if facts contradict them, or if the network's
    output is not supported.
    """
    weights = family.weights
    vectors = {name: state[name].float() for name in chain(*PAIRS) if name in state}
    statistics = {
        name: tuple(value.flatten().tolist())
        for name, value in zip(("mean", "std"), mean_and_deviation(vectors) or ())
    }
    facts = {**facts, "latent_statistics": statistics}
    try:
        spec = weights.identify(shapes_of(state), facts)
        reference = weights.convert(state)
    except KeyError as missing:
        raise given.error(f"is not a {family.name}: no {missing.args[0]}") from None
    except UsageError as error:
        raise given.error(error.problem, given.override_hint(error.parameter)) from None
    except ValueError as error:
        raise given.error(str(error)) from None
    require_fit(given, reference, spec.empty())
    last = f"its last layer makes {spec.out_channels} channels"
    if facts.get("learn_sigma") is (not spec.learn_sigma):
        raise given.error(
            f"specifies learn_sigma {facts['learn_sigma']}, and {last} of {spec.in_channels}",
            "save it again without that entry",
        )
    if family.prediction == "data" and spec.learn_sigma:
        raise given.error(
            f"{last}, and an estimate of the clean picture has {spec.in_channels}",
            "nothing else is sampled",
        )
    if family.prediction == "noise" and not spec.learn_sigma and facts.get("sigma_small"):
        raise given.error(
            f"was trained with sigma_small {shown(facts['sigma_small'])} and without a learned "
            "variance, and only sigma_small False is sampled"
        )
    return spec


def require_user_facts(given: InputRef, spec: ModelSpec, user_facts: UserFacts) -> None:
    """Raise UsageError if the weights belong to another model than the user's."""
    model = user_facts.model
    if user_facts.num_heads not in (None, spec.num_heads):
        raise UsageError(
            f"these weights have {spec.num_heads}",
            "drop it",
            parameter="num_heads",
            value=user_facts.num_heads,
        )
    if model in (None, spec.model):
        return
    if spec.model in spec.family.models:
        raise given.error(
            f"contains the weights of {spec.model}, not of {model}", f"use `model={spec.model}`"
        )
    given.warn(f"contains the weights of {spec.model}; `model={model}` only sets the family")


def print_assumptions(
    given: InputRef, spec: ModelSpec, facts: Mapping[str, Any], user_facts: UserFacts
) -> None:
    """Print notices about assumed heads and classes. facts: the file's."""
    family = spec.family
    of_file = facts.get("model")
    in_training = family.names_in_training.get(spec.model, spec.model)
    is_named = spec.model in (user_facts.model, shipped_as(given.name))
    named = is_named or of_file in (spec.model, in_training)
    if not named and family_of(of_file):
        given.warn(f"specifies model {of_file}, and its entries are of {spec.model}")
    if spec.assumes_heads and not named:
        given.warn(
            f"specifies no number of heads, taken for {spec.num_heads}, as models of its depth and "
            f"width have; if it has others: {given.override_hint('num_heads', 'N')}"
        )
    default = family.defaults_of(spec.model).num_classes
    if (
        user_facts.num_classes is None
        and user_facts.guided is None  # the guided network has the same classes
        and "num_classes" not in facts
        and not (spec.num_classes in (1000, default) and named)
    ):
        classes = spec.num_classes
        given.warn(
            f"{classes} classes and the null class (without a null class it is "
            f"`num_classes={classes + 1}`)"
            if spec.null_class
            else "one class and no null class"
        )


# ---- The family ----


def choose_family(
    given: InputRef, have: Shapes, facts: Mapping[str, Any], user_facts: UserFacts = NO_USER_FACTS
) -> list[Family]:
    """Return the candidate families of weights with the shapes `have`, the most likely first.

    Narrow them down by, in this order: tensor names, the user's model, our `family` entry in the
    file, the name of a published file, and training arguments. Raises UsageError if no family
    matches, or if the user or the file names another family.
    """
    possible = families_with(have)
    wanted = family_of(user_facts.model)
    if not possible:
        likely, *others = sorted(families(), key=lambda family: family != wanted)
        missing = next(key for key in likely.keys if key not in have)
        names = " or ".join(f"a {family.name}" for family in others)
        raise given.error(f"is not a {likely.name}: no {missing}", f"nor is it {names}")
    named = wanted.name if wanted else facts.get("family")
    if named and named not in [family.name for family in possible]:
        remedy = "drop `model`" if wanted else "save it again"
        raise given.error(f"is not a {shown(named)} but a {possible[0].name}", remedy)
    shipped = shipped_as(given.name)
    model = facts.get("model")
    steps: list[Callable[[Family], bool]] = [
        lambda family: family.name == named,
        lambda family: shipped in family.models,
        *(
            partial(Family.writes, name=name, value=facts[name])
            for name in TELLING_ARGUMENTS
            if name in facts
        ),
        # The family that owns this model name.
        lambda family: f"{model}".partition("-")[0] == family.name,
    ]
    for step in steps:
        possible = list(filter(step, possible)) or possible
    guided = user_facts.guided.family if user_facts.guided else None
    return sorted(possible, key=lambda family: family != guided)


def families_with(have: Shapes) -> list[Family]:
    """Return the families whose keys are all in `have`. The largest set of keys wins, among equal
    ones the family whose marks are in `have`.
    """
    having = [family for family in families() if have.keys() >= {*family.keys}]
    most = max((len(family.keys) for family in having), default=0)
    likely = [family for family in having if len(family.keys) == most]
    marked = [family for family in likely if any(name.startswith(family.marks) for name in have)]
    return marked or likely


def family_notice(family: Family, remedy: str) -> str:
    """Return the notice that the family is an assumption. remedy: names the other families."""
    return (
        f"names no family, taken for a {family.name} ({family.prediction}); if it is not: {remedy}"
    )


def flags_of(given: InputRef, spec: ModelSpec, families: Sequence[Family]) -> str:
    """Return the flags that choose one of `families`: the model of the same size, or the first."""
    size = spec.model.removeprefix(spec.family.name)
    models = [min(each.models, key=lambda name: not name.endswith(size)) for each in families]
    return " or ".join(given.override_hint("model", name) for name in models)


# ---- Classes ----


def classes_of(given: InputRef, rows: int, facts: Mapping[str, Any], user_facts: UserFacts) -> int:
    """Return the number of classes of a label table with `rows` rows, of which the last may be the
    null class. Raises UsageError if the user or the file specifies another number.
    """
    wanted = user_facts.num_classes
    shipped = shipped_as(given.name)
    certain = require_family_of(shipped).models[shipped].num_classes if shipped else None
    if wanted == rows and facts.get("num_classes", certain) == rows - 1:
        raise UsageError(
            f"{given.name} has {rows - 1} classes, and its label table one more row for no class",
            "drop `num_classes`",
            parameter="num_classes",
            value=wanted,
        )
    of_guided = user_facts.guided and user_facts.guided.num_classes
    if of_guided and "num_classes" not in facts and rows in (of_guided, of_guided + 1):
        wanted = of_guided
        if rows == of_guided:
            given.warn(
                f"has a label table of {rows} rows, taken for {rows} classes and no null class, as "
                "the network that it guides has so many classes"
            )
    classes = facts.get("num_classes", max(rows - 1, 1)) if wanted is None else wanted
    if rows in (classes, classes + 1):
        return classes
    if wanted is None:
        remedy = "give `num_classes`" if given.option == "ckpt" else "save it again"
        raise given.error(
            f"specifies num_classes {classes}, and its label table has {rows} rows", remedy
        )
    raise UsageError(
        f"the label table in {given.name} has {rows} rows, one for each class and one for no class",
        f"use `num_classes={max(rows - 1, 1)}`",
        parameter="num_classes",
        value=wanted,
    )


def shipped_as(name: str) -> str | None:
    """Return the model with shipped or published weights of this name or path, or None."""
    for model, defaults in chain.from_iterable(family.models.items() for family in families()):
        ships = defaults.ckpt and Path(defaults.ckpt).resolve() == Path(name).resolve()
        if ships or Path(name).name in defaults.published.values():
            return model
    files = ChainMap(*(dict(family.files) for family in families()))
    return files.get(Path(name).name)
