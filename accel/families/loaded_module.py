"""Weights from a network that the caller holds, in place of a Checkpoint: models.DiT, the
original classes of every family, and their wrappers. Each family's weights.py recognises
its own modules by `of_module`.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accel.errors import UsageError
from accel.families import families
from accel.families.recognise import (
    Fit,
    OfModule,
    families_with,
    recognise,
    recogniser_of,
    reference_state,
)
from accel.weights import Weights
from accel.weights.digests import digest
from accel.weights.positions import trained
from accel.weights.safetensors_layout import without_prefix
from accel.weights.shapes import require_fit, shapes_of
from accel.weights.tensor_files import require_finite_floats, require_floats

COMPILER = "torch._dynamo.eval_frame"  # the module of torch.compile's wrapper
# attributes that change a submodule's function and are in no state dict
COMPARED = "eps", "approximate"


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside wrappers.

    These are DataParallel, DistributedDataParallel, AveragedModel and torch.compile. Raises
    UsageError for hooks, a forward or a __call__ of a wrapper's own: the model runs without them.
    """
    while True:
        base = next((base for base in _wrappers() if isinstance(model, base)), None)
        if base is None:
            return model
        name = type(model).__name__
        if model._forward_hooks or model._forward_pre_hooks:
            raise UsageError(f"{name}: has forward hooks, which would not run; remove them first")
        for method in ("forward", "__call__"):
            if not _is_torchs(model, method, base):
                raise UsageError(
                    f"{name}: has a {method} of its own, which would not run; give the model inside"
                )
        model = getattr(model, "_orig_mod" if base.__module__ == COMPILER else "module")


def _wrappers():
    """Return torch's wrappers around a network; that of torch.compile once it is in use."""
    compiler = sys.modules.get(COMPILER)
    return (
        torch.nn.DataParallel,
        torch.nn.parallel.DistributedDataParallel,
        torch.optim.swa_utils.AveragedModel,
        *([compiler.OptimizedModule] if compiler else ()),
    )


def _is_torchs(wrapper, method, base):
    """Return whether a method of a wrapper is that of torch's class `base`."""
    if method in vars(wrapper):
        # torch.compile gives each of its wrappers a forward. What it was written in tells it
        # from another, which may have copied its name and attributes.
        written_in = getattr(vars(wrapper)[method], "__globals__", {}).get("__name__")
        return base.__module__ == COMPILER and written_in == COMPILER
    return getattr(type(wrapper), method) is getattr(base, method)


class LoadedModule:
    """The weights of a module that the caller holds, and the facts that follow from them.

    module: a network, or a pipeline with one; wrapped and compiled modules are unwrapped.
    `state`: the weights under the names of the family's files, not copied unless `copy`.
    `fit`: their family and sizes. Raises UsageError, naming the difference, for another network.
    """

    def __init__(self, module: nn.Module, copy: bool = False):
        names = ()
        schedule = None
        if not isinstance(module, nn.Module):
            names = _class_names(getattr(module, "labels", None))
            schedule = getattr(getattr(module, "scheduler", None), "config", None)
            module = getattr(module, "transformer", module)  # a pipeline's
        if not isinstance(module, nn.Module):
            raise UsageError(
                f"{type(module).__name__}: is not a DiT; give a torch.nn.Module, or a pipeline "
                "with one"
            )
        self.module = unwrapped(module)
        self.name = type(self.module).__name__
        state = _not_wrapped(self.module.state_dict())
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.is_quantized or value.is_nested:
                raise UsageError(
                    f"{self.name}: {name} is quantised or nested; give a model of dense tensors of "
                    "floats"
                )
            if value.is_meta:
                raise UsageError(f"{self.name}: {name} holds no values; load the weights first")
        self.rules = rules = self._recognised(state)
        raw = self.renamed(state)
        rows = raw[recogniser_of(rules.family).labels].shape[0]
        classes = getattr(getattr(self.module, "y_embedder", None), "num_classes", rows - 1)
        if classes not in (rows, rows - 1):
            classes = rows - 1
        # Of no classes the one label, the null class, is sampled without guidance.
        self.metadata = {
            "family": rules.family.name,
            "num_classes": max(classes, 1),
            "class_names": names,
            "schedule": schedule and dict(schedule),
            **rules.metadata,
        }
        try:
            fit = recognise(self.name, raw, self.metadata)
            self.fit = fit._replace(
                model=self.name, latent_size=rules.latent_size or fit.latent_size
            )
        except UsageError as error:
            raise UsageError(error.marked.replace(f"`ckpt={self.name}`", self.name)) from None
        require_floats(raw, self.name)
        if rules.timestep_embedding:
            self.fit = self.fit._replace(
                build=partial(_with_embedding, self.fit.build, rules.timestep_embedding)
            )
        self.state = {name: value.clone() for name, value in raw.items()} if copy else raw
        self._require_attributes()

    @property
    def assumed(self) -> str:
        """Return what is assumed of the module, in words. "" if its class or its entries name
        its family, or no other family has these entries.
        """
        if self.rules.assumed:
            return self.rules.assumed
        names = [base.__name__ for base in type(self.module).__mro__]
        named = self.rules.strength or any(self.rules.family.name in name for name in names)
        if named or len(families_with(shapes_of(self.state))) == 1:
            return ""
        family = self.rules.family
        return f"names no family, taken for a {family.name} ({family.prediction})"

    def _recognised(self, state) -> OfModule:
        for name, part in self.module.named_children():
            if families_with(shapes_of(part.state_dict())):
                raise UsageError(f"{self.name}: holds the network; give its .{name}")
        try:
            recognisers = map(recogniser_of, families())
            answers = [each.of_module(self.module, state) for each in recognisers]
        except ValueError as error:
            raise UsageError(f"{self.name}: {error}") from None
        except (KeyError, AttributeError) as error:
            raise UsageError(
                f"{self.name}: is not a DiT: no {getattr(error, 'name', None) or error.args[0]}"
            ) from None
        claims = [rules for rules in answers if rules is not None]
        if not claims:
            keys = " and no ".join(family.keys[1] for family in families()[:2])
            raise UsageError(f"{self.name}: is not a DiT: no {keys}")
        return max(claims, key=lambda rules: rules.strength)

    def renamed(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict of the module under the names of its family's files."""
        try:
            state = {name: value.detach() for name, value in _not_wrapped(state).items()}
            return self.rules.read(without_prefix(state))
        except ValueError as error:
            raise UsageError(f"{self.name}: {error}") from None

    def _require_attributes(self):
        theirs = _not_wrapped(dict(self.module.named_modules()))
        for name, module in self.fit.empty(self.fit.latent_size).named_modules():
            for attribute in COMPARED:
                want = getattr(module, attribute, None)
                if want is not None and getattr(theirs.get(name), attribute, want) != want:
                    here = getattr(theirs[name], attribute)
                    raise UsageError(
                        f"{self.name}: {name}.{attribute} is {here}, and only {want} is computed"
                    )

    @contextmanager
    def reading(self) -> Iterator[dict[str, Tensor]]:
        """Yield the weights; they stay until `release`."""
        yield self.state

    def digest(self) -> str:
        """Return 16 hex digits of all values that were trained, as of a file's."""
        return digest(trained({name: value.cpu() for name, value in self.state.items()}))

    def release(self) -> None:
        """Drop the module and its weights; keep the facts."""
        self.module = self.state = None


@dataclass(frozen=True)
class LoadedState:
    """A state dict in place of the weights that a network was made from."""

    name: str
    state: dict[str, Tensor]
    metadata: dict[str, Any]


def read_state(
    name: str, state: Mapping[str, Tensor], weights: Weights, fit: Fit, side: int
) -> LoadedState:
    """Return the weights of a state dict. Its names are those of the module or of the file
    `weights`, whose family and sizes are `fit`. side: of latents. Raises UsageError about `name`
    for another network's, and for anything but dense tensors of finite floats by name.
    """
    if not isinstance(state, Mapping):
        raise UsageError(
            f"{name}: a state dict maps names to tensors, and this is a {type(state).__name__}"
        )
    require_floats(state, name)
    require_finite_floats(state, name)
    is_module = isinstance(weights, LoadedModule)
    state = weights.renamed(state) if is_module else without_prefix(state)
    loaded = LoadedState(name, state, weights.metadata)
    try:
        state = reference_state(loaded, fit)
    except KeyError as missing:
        raise UsageError(f"{name}: is not such a state dict: no {missing.args[0]}") from None
    require_fit(name, state, fit.empty(side))
    return loaded


def _not_wrapped(named):
    """Return what has names in a module by its names without compiled parts' wrappers."""
    return {f"{name}.".replace("_orig_mod.", "")[:-1]: value for name, value in named.items()}


def _with_embedding(
    build: Callable[..., nn.Module], embedding: Callable, **shape: Any
) -> nn.Module:
    """Build a reference network with another embedding of timesteps."""
    model = build(**shape)
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
