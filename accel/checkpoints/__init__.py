"""Sources of weights: a file, a folder, a hub id, a module or a state dict → a `Source`.

files.py opens files, folders and hub ids: each layout in LAYOUTS has a module. module.py reads
modules and state dicts. Once a source is open, nobody asks of what kind it was.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from accel.checkpoints.facts import checked_options
from accel.errors import Given, UsageError
from accel.families.identify import NO_HINTS, Hints, identify
from accel.families.spec import ModelSpec, StateDict, reference_state, weights_of


class Contents(NamedTuple):
    """The contents of a file or folder: float tensors by name, and the facts beside them."""

    state: StateDict
    facts: Mapping[str, Any]


class Tensors(Protocol):
    """The tensors of a source, under the names of their family's files; not to be written to."""

    @property
    def state(self) -> StateDict: ...

    def reading(self) -> AbstractContextManager[StateDict]:
        """Yield `state` for its last use. Raises UsageError if it was changed meanwhile."""

    def digest(self) -> str:
        """Return 16 hex digits of all values that were trained."""

    def same_as(self, other: "Tensors") -> bool:
        """Return whether both are the same file."""


@dataclass(frozen=True)
class Source:
    """Where weights come from.

    given: as the user gave them. spec: their network. tensors: of any kind of source.
    """

    given: Given
    spec: ModelSpec
    tensors: Tensors

    @property
    def name(self) -> str:
        """Return the user's name for the weights."""
        return self.given.name

    def saying(self, **options: Any) -> "Source":
        """Return the source, whose spec says these values of options too."""
        return replace(self, spec=self.spec.changed(says={**self.spec.says, **options}))

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
    given: Given,
    state: StateDict,
    facts: Mapping[str, Any],
    hints: Hints = NO_HINTS,
    facts_beside: Callable[[], Mapping[str, Any]] = dict,
) -> ModelSpec:
    """Return the spec of weights with the entries `state`, under the names of their family's
    files, and of the facts that come with them. facts_beside: reads others, if the family has such
    files. Raises UsageError for weights of no family, and for contradictions.
    """
    spec = identify(given, state, facts, hints)
    weights = weights_of(spec.family)
    if weights.has_files_beside and "config" not in facts:
        facts = {**facts, **facts_beside()}
    schedule = facts.get("schedule")
    if isinstance(schedule, dict):  # of a pipeline; else an argument of a training run
        from accel.sampling.solvers import require_schedule  # few weights have one

        require_schedule(given.error, schedule)
    try:
        said = weights.says(given, spec, facts)
    except UsageError:
        raise
    except (TypeError, ValueError) as error:
        raise given.error(f"its training arguments cannot be read ({error})", "mend it") from None
    if "beside" in facts:
        from accel.checkpoints.beside import require_function  # few weights have such a file

        require_function(given, facts["beside"], spec)
    options = checked_options(given, said.options, "its training arguments say")
    return spec.changed(
        says={**spec.says, **options},
        latent_settings={
            **spec.latent_settings,
            **said.latent_settings,
            **weights.latent_settings_of(state),
        },
        assumed=said.assumed,
        said_by=said.file,
    )
