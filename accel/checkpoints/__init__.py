"""Load a file, a folder, a hub id, a module or a state dict as a `Checkpoint`.

loading.py opens files, folders and hub ids; each file format in FORMATS has a module. module.py
reads modules and state dicts. Once opened, all checkpoints look the same.
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
    """The contents of a file or folder: float tensors by name, and facts."""

    state: StateDict
    facts: Mapping[str, Any]


class Tensors(Protocol):
    """The read-only tensors of a checkpoint, under the names in its family's files."""

    @property
    def state(self) -> StateDict: ...

    def reading(self) -> AbstractContextManager[StateDict]:
        """Yield `state` for its last use. Raises UsageError if the file changed meanwhile."""

    def digest(self) -> str:
        """Return a hash of the trained values, 16 hex digits."""

    def same_as(self, other: "Tensors") -> bool:
        """Return whether both come from the same file."""


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a network.

    given: the user's name for them. spec: the network. tensors: from a file or a module.
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
        """Return the tensors under the reference network's names, on their own device."""
        return reference_state(self.spec, self.tensors.state)

    @contextmanager
    def reading(self) -> Iterator[StateDict]:
        """Yield `state` for its last use; a file's tensors are freed afterwards. Raises UsageError
        if the file changed since it was opened.
        """
        with self.tensors.reading() as state:
            yield reference_state(self.spec, state)

    def digest(self) -> str:
        """Return a hash of the network's function: of its tensors, and of facts that change it."""
        return self.spec.digest(self.tensors.digest())


def spec_of(
    given: InputRef,
    state: StateDict,
    facts: Mapping[str, Any],
    user_facts: UserFacts = NO_USER_FACTS,
    yaml_arguments: Callable[[], tuple[str, Mapping[str, Any]]] = lambda: ("", {}),
) -> ModelSpec:
    """Identify a network from its weights. Return its spec.

    state: tensors under the names in the family's files. facts: metadata that this program or a
    pipeline wrote, with the family's name, or else the arguments of a training run.
    yaml_arguments: reads the training arguments from a YAML file next to the weights, for
    families that write one. Raises UsageError if no family matches, or for an unsupported value.
    """
    possible = choose_family(given, shapes_of(state), facts, user_facts)
    weights = weights_of(possible[0])
    file = ""
    if "family" not in facts:
        if weights.has_yaml_file and facts.keys().isdisjoint(weights.arguments):
            file, facts = yaml_arguments()
        facts = _facts_in(given, facts, weights, file)
    schedule = facts.get("schedule")
    if schedule is not None:
        from accel.sampling.solvers import require_schedule  # lazy import: only for pipelines

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
    """Convert the arguments of a training run to facts."""
    facts = interpreted(given, arguments, weights.arguments, file and f"{file}: ")
    published = weights.recommended.get(PurePath(given.name).stem.lower(), {})
    try:
        return {**facts, "recipe": weights.recipe(facts) or published}
    except TypeError as error:
        raise given.error(f"its training arguments cannot be read ({error})", "fix them") from None
