"""A network that the caller holds as a source: models.DiT, the original classes of every family,
their wrappers, pipelines. Each family's weights.py recognises its own modules by `of_module`. And
the state dict of such a network.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accel.checkpoints import Source, spec_of
from accel.checkpoints.names import without_prefix
from accel.errors import Given
from accel.families import families
from accel.families.identify import families_with
from accel.families.spec import ModelSpec, ModuleRules, StateDict, weights_of
from accel.tensors.digests import digest
from accel.tensors.positions import trained
from accel.tensors.shapes import require_fit, shapes_of
from accel.tensors.tensor_files import floats_of, require_finite_floats

COMPILER = "torch._dynamo.eval_frame"  # the module of torch.compile's wrapper


def unwrapped(model: Any) -> nn.Module:
    """Return the model inside DataParallel, DistributedDataParallel, AveragedModel and
    torch.compile's wrapper.
    """
    while True:
        if isinstance(model, _WRAPPERS):
            model = model.module
        elif type(model).__module__ == COMPILER:
            model = model._orig_mod
        else:
            return model


_WRAPPERS = (
    nn.DataParallel,
    nn.parallel.DistributedDataParallel,
    torch.optim.swa_utils.AveragedModel,
)


class HeldState:
    """A state dict in place of the tensors that a network was made from."""

    def __init__(self, state: StateDict):
        self.state = state

    @contextmanager
    def reading(self) -> Iterator[StateDict]:
        """Yield the tensors."""
        yield self.state

    def digest(self) -> str:
        """Return 16 hex digits of all values that were trained, as of a file's."""
        return digest(trained({name: value.cpu() for name, value in self.state.items()}))

    def same_as(self, other: Any) -> bool:
        """Return False: what a caller gives twice is the caller's choice."""
        return False


class HeldModule(HeldState):
    """A network that the caller holds, and how to read and call it.

    whole: as the caller gave it, wrapped or not. module: without wrappers. rules: of its family.
    state: its weights under the names of the family's files, not copied unless `copy`. source:
    with these weights. Raises UsageError, naming the difference, for another network.
    """

    def __init__(self, module: Any, copy: bool = False, option: str = ""):
        names: tuple[str, ...] = ()
        schedule = None
        if not isinstance(module, nn.Module):
            names = _class_names(getattr(module, "labels", None))
            scheduler = getattr(module, "scheduler", None)
            schedule = getattr(scheduler, "config", None)
            schedule = schedule and {**schedule, "_class_name": type(scheduler).__name__}
            module = getattr(module, "transformer", module)  # a pipeline's
        if not isinstance(module, nn.Module):
            problem = "is not a DiT; give a torch.nn.Module, or a pipeline with one"
            raise Given(type(module).__name__, option).error(problem)
        self.whole = module
        self.module = unwrapped(module)
        self.given = Given(type(self.module).__name__, option)
        state = _not_wrapped(_tensors_of(self.module))
        if any(getattr(value, "is_meta", False) for value in state.values()):
            raise self.given.error("holds no values", "load the weights first")
        self.rules = rules = self._recognised(state)
        raw = floats_of(self.renamed(state), self.given)
        spec = spec_of(self.given, raw, self._facts(raw, names, schedule))
        spec = spec.changed(
            model=self.given.name,
            latent_size=rules.latent_size or spec.latent_size,
            assumed={**spec.assumed, **self._assumed(raw)},
        )
        if rules.timestep_embedding:
            embedding = partial(_with_embedding, spec.network, rules.timestep_embedding)
            name = rules.timestep_embedding.__module__
            spec = spec.changed(network=embedding, timestep_embedding=name)
        super().__init__({name: value.clone() for name, value in raw.items()} if copy else raw)
        self.source = Source(self.given, spec, self)

    @property
    def spec(self) -> ModelSpec:
        """Return the spec of the network."""
        return self.source.spec

    def _facts(self, raw, names, schedule):
        """Return the facts that follow from the module and its pipeline."""
        labels = weights_of(self.rules.family).labels
        if labels not in raw:
            raise self.given.error(f"is not a {self.rules.family.name}: no {labels}")
        rows = len(raw[labels])
        classes = getattr(getattr(self.module, "y_embedder", None), "num_classes", rows - 1)
        if classes not in (rows, rows - 1):
            classes = rows - 1
        return {
            "family": self.rules.family.name,
            # Of no classes the one label, the null class, is sampled without guidance.
            "num_classes": max(classes, 1),
            "class_names": names,
            "schedule": schedule,
            **self.rules.facts,
        }

    def _assumed(self, raw) -> dict[str, str]:
        """Return what is assumed of the module, in words: nothing if its class or its entries name
        its family, or no other family has these entries.
        """
        if self.rules.assumed:
            return {"": self.rules.assumed}
        names = [base.__name__ for base in type(self.module).__mro__]
        family = self.rules.family
        named = self.rules.strength or any(family.name in name for name in names)
        if named or len(families_with(shapes_of(raw))) == 1:
            return {}
        return {"": f"names no family, taken for a {family.name} ({family.prediction})"}

    def _recognised(self, state) -> ModuleRules:
        parts = self.module.named_children()
        holding = [name for name, part in parts if families_with(shapes_of(_tensors_of(part)))]
        if holding:
            part = next((name for name in holding if "ema" in name.split("_")), holding[0])
            raise self.given.error("holds the network", f"give its .{part}")
        try:
            answers = [weights_of(family).of_module(self.module, state) for family in families()]
        except ValueError as error:
            raise self.given.error(str(error)) from None
        except (KeyError, AttributeError) as error:
            missing = getattr(error, "name", None) or error.args[0]
            raise self.given.error(f"is not a DiT: no {missing}") from None
        claims = [rules for rules in answers if rules is not None]
        if not claims:
            keys = " and no ".join(family.keys[1] for family in families()[:2])
            raise self.given.error(f"is not a DiT: no {keys}")
        return max(claims, key=lambda rules: rules.strength)

    def renamed(self, state: StateDict) -> StateDict:
        """Return a state dict of the module under the names of its family's files."""
        try:
            state = {name: value.detach() for name, value in _not_wrapped(state).items()}
            return self.rules.read(without_prefix(state))
        except ValueError as error:
            raise self.given.error(str(error)) from None

    def release(self) -> None:
        """Drop the module and its weights; keep the facts."""
        del self.module, self.whole
        self.state = {}


def of_state(
    given: Given,
    state: Mapping[str, Tensor],
    spec: ModelSpec,
    side: int,
    renamed: Callable[[StateDict], StateDict] = without_prefix,
) -> Source:
    """Return the source with a state dict of the network `spec`. renamed: gives its entries the
    names of the family's files. side: of latents. Raises UsageError for another network's, and
    for tensors that are not of finite floats.
    """
    if not isinstance(state, Mapping):
        name = type(state).__name__
        raise given.error(f"a state dict maps names to tensors, and this is a {name}")
    floats = floats_of(state, given)
    require_finite_floats(floats, given)
    source = Source(given, spec, HeldState(renamed(floats)))
    try:
        require_fit(given, source.state, spec.empty(side))
    except KeyError as missing:
        raise given.error(f"is not such a state dict: no {missing.args[0]}") from None
    return source


def _tensors_of(module):
    """Return a module's state dict without the other objects that quantised layers put there."""
    return {name: part for name, part in module.state_dict().items() if torch.is_tensor(part)}


def _not_wrapped(named):
    """Return what has names in a module by its names without compiled parts' wrappers."""
    return {f"{name}.".replace("_orig_mod.", "")[:-1]: value for name, value in named.items()}


def _with_embedding(
    network: Callable[..., nn.Module], embedding: Callable, **arguments: Any
) -> nn.Module:
    """Return a reference network with another embedding of timesteps."""
    model: Any = network(**arguments)
    model.t_embedder.timestep_embedding = embedding
    return model


def _class_names(labels):
    """Return the name of every class by number, from a DiTPipeline's numbers by name; ()
    if a number has none.
    """
    names = [[] for _ in range(1 + max((labels or {}).values(), default=-1))]
    for name, number in (labels or {}).items():
        names[number].append(name)
    return tuple(map(", ".join, names)) if all(names) else ()
