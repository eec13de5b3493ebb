"""Sources of weights: a file, a folder, a hub id, a module or a state dict → a `Checkpoint`.

files.py opens files, folders and hub ids: each layout in FORMATS has a module. module.py reads
modules and state dicts. Once a checkpoint is open, nobody asks of what kind it was.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple, Protocol

from accel.checkpoints.arguments import interpreted
from accel.checkpoints.facts import checked
from accel.errors import InputRef
from accel.families.identify import NO_USER_FACTS, UserFacts, choose_family, identify
from accel.families.spec import (
    FamilyWeights,
    ModelSpec,
    StateDict,
    reference_state,
    weights_of,
)
from accel.tensors.shapes import shapes_of


class Contents(NamedTuple):
    """The contents of a file or folder: float tensors by name, and the facts beside them."""

    state: StateDict
    facts: Mapping[str, Any]


class Tensors(Protocol):
    """The read-only tensors of a checkpoint, under the names in its family's files."""

    @property
    def state(self) -> StateDict: ...

    def reading(self) -> AbstractContextManager[StateDict]:
        """Yield `state` for its last use. Raises UsageError if it was changed meanwhile."""

    def digest(self) -> str:
        """Return 16 hex digits of all values that were trained."""

    def same_as(self, other: "Tensors") -> bool:
        """Return whether both are the same file."""


@dataclass(frozen=True)
class Checkpoint:
    """Where weights come from.

    given: as the user gave them. spec: their network. tensors: of any kind of checkpoint.
    """

    given: InputRef
    spec: ModelSpec
    tensors: Tensors

    @property
    def name(self) -> str:
        """Return the user's name for the weights."""
        return self.given.name

    @property
    def state(self) -> StateDict:
        """Return the tensors under the names of the reference network, on their own device."""
        return reference_state(self.spec, self.tensors.state)

    @contextmanager
    def reading(self) -> Iterator[StateDict]:
        """Yield `state` for its last use: afterwards the tensors of a file are dropped. Raises
        UsageError if a file was changed since it was opened.
        """
        with self.tensors.reading() as state:
            yield reference_state(self.spec, state)

    def digest(self) -> str:
        """Return 16 hex digits of all that decides the network's function."""
        return self.spec.digest(self.tensors.digest())


def spec_of(
    given: InputRef,
    state: StateDict,
    facts: Mapping[str, Any],
    user_facts: UserFacts = NO_USER_FACTS,
    arguments_beside: Callable[[], tuple[str, Mapping[str, Any]]] = lambda: ("", {}),
) -> ModelSpec:
    """Return the spec of weights with the entries `state`, under the names of their family's
    files. facts: that this program or a pipeline wrote, with the family's name, else the
    arguments of a training run. arguments_beside: reads more of them from another file, if the
    family has such files. Raises UsageError for weights of no family, and for values that are
    not supported.
    """
    possible = choose_family(given, shapes_of(state), facts, user_facts)
    weights = weights_of(possible[0])
    file = ""
    if "family" not in facts:
        if weights.has_files_beside and facts.keys().isdisjoint(weights.arguments):
            file, facts = arguments_beside()
        facts = _facts_in(given, facts, weights, file)
    schedule = facts.get("schedule")
    if schedule is not None:  # of a pipeline
        from accel.sampling.solvers import require_schedule  # few weights have one

        require_schedule(given, schedule)
    facts = checked(given, facts)
    spec = identify(given, state, facts, user_facts, possible)
    named = facts.get("model", spec.model)
    if file and named != spec.model and {named, spec.model} <= spec.family.models.keys():
        raise given.error(f"{file} describes {named}, and the weights are {spec.model}", "move it")
    return spec.changed(specified_in=file) if spec.recommended else spec


def _facts_in(
    given: InputRef, arguments: Mapping[str, Any], weights: FamilyWeights, file: str
) -> dict[str, Any]:
    """Return the facts that the arguments of a training run give."""
    facts = interpreted(given, arguments, weights.arguments, file and f"{file}: ")
    published = weights.recommended.get(PurePath(given.name).stem.lower(), {})
    try:
        return {**facts, "recipe": weights.recipe(facts) or published}
    except TypeError as error:
        raise given.error(f"its training arguments cannot be read ({error})", "fix them") from None
