"""Load weights from a module: models.DiT, the original class of any family, a wrapper or a
pipeline; or from its state dict.

The tensor names identify the family, whose weights.py returns the `CallAdapter`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from accel.checkpoints import Checkpoint
from accel.checkpoints.single_file import without_prefix
from accel.errors import InputRef, UsageError
from accel.families import Family, families
from accel.families.identify import families_with, family_notice, identify
from accel.families.spec import CallAdapter, ModelSpec, StateDict, unchanged
from accel.sampling.solvers import require_schedule
from accel.tensors.digests import digest
from accel.tensors.shapes import require_fit, shapes_of
from accel.tensors.tables import trained
from accel.tensors.tensor_files import floats_of, require_finite_floats

COMPILER = "torch._dynamo.eval_frame"  # the module of torch.compile's wrapper
WRAPPERS = (
    nn.DataParallel,
    nn.parallel.DistributedDataParallel,
    torch.optim.swa_utils.AveragedModel,
)


def unwrapped(model: Any) -> nn.Module:
    """Return the model inside DataParallel, DistributedDataParallel, AveragedModel and
    torch.compile's wrapper.
    """
    while (compiled := type(model).__module__ == COMPILER) or isinstance(model, WRAPPERS):
        model = model._orig_mod if compiled else model.module
    return model


@dataclass(frozen=True, eq=False)
class StateTensors:
    """The tensors of a module or a state dict."""

    state: StateDict

    @contextmanager
    def reading(self) -> Iterator[StateDict]:
        """Yield the tensors."""
        yield self.state

    def digest(self) -> str:
        """Return a hash of the trained values, equal to that of a file."""
        return digest(trained({name: value.cpu() for name, value in self.state.items()}))


def from_module(model: Any, option: str = "") -> tuple[Checkpoint, CallAdapter]:
    """Identify a module, wrapped or not, or a pipeline's transformer. Return its checkpoint, which
    shares its tensors, and its call adapter.

    option: the option that the module was passed as, for errors. Raises UsageError if no family
    matches, or for unsupported sizes or arguments.
    """
    pipeline = None if isinstance(model, nn.Module) else model
    model = getattr(pipeline, "transformer", model)
    module: Any = unwrapped(model)
    given = InputRef(type(module).__name__, option)
    if not isinstance(model, nn.Module):
        raise given.error("is not a DiT; give a torch.nn.Module, or a pipeline with one")
    state = _tensors_of(module.state_dict())
    if any(value.is_meta for value in state.values()):
        raise given.error("contains no values", "load the weights first")
    family, notice = _family_of(given, module, state)
    try:
        facts, adapter = family.weights.of_module(module, state)
        raw = adapter.renamed(state)
        rows = len(raw[family.weights.labels])
    except ValueError as error:
        raise given.error(str(error)) from None
    except (KeyError, AttributeError) as error:
        missing = getattr(error, "name", None) or error.args[0]
        raise given.error(f"is not a {family.name}: no {missing}") from None
    classes = getattr(getattr(module, "y_embedder", None), "num_classes", None)
    # The one label of a model without classes is the null class, sampled without guidance.
    number = max(classes if classes in (rows, rows - 1) else rows - 1, 1)
    of_pipeline = {} if pipeline is None else _pipeline_facts(given, pipeline)
    facts = {"num_classes": number, **of_pipeline, **facts}
    raw = floats_of(raw, given)
    spec = identify(given, raw, facts, family)
    channels = min(spec.defaults.guidance_channels, spec.out_channels)
    spec = replace(
        spec,
        model=given.name,
        latent_size=spec.latent_size or module.input_size,
        recommended={**spec.recommended, "guidance_channels": channels},
        timestep_embedding=facts.get("timestep_embedding"),
    )
    return Checkpoint(given, spec, StateTensors(raw), notice), adapter._replace(module=model)


def _family_of(given: InputRef, module: nn.Module, state: StateDict) -> tuple[Family, str]:
    """Identify a module's family by its tensor names, then by its class. Return the family, and a
    notice if several remain.
    """
    alike = families_with(shapes_of(state)) or [
        family for family in families() if family.diffusers_key in state
    ]
    if not alike:
        for name, part in module.named_children():
            if families_with(shapes_of(_tensors_of(part.state_dict()))):
                raise given.error("contains the network", f"give its .{name}")
        keys = " and no ".join(family.keys[1] for family in families()[:2])
        raise given.error(f"is not a DiT: no {keys}")
    # The longest class name in the name of the module's class, or else of a base class.
    class_names = [family.class_name for family in families() if family.class_name]
    longest_first = sorted(class_names, key=len, reverse=True)
    bases = [base.__name__ for base in type(module).__mro__]
    called_as = next((name for base in bases for name in longest_first if name in base), None)
    called = [family for family in alike if family.class_name == called_as]
    sure = [family for family in called if any(hasattr(module, name) for name in family.attributes)]
    possible = sure[:1] or called or alike
    family = min(possible, key=lambda family: family.name != family.class_name)
    others = " or ".join(
        f"{other.class_name} with an attribute {other.attributes[0]} for a {other.name}"
        for other in possible
        if other != family
    )
    if not others:
        return family, ""
    return family, family_notice(family, f"name its class {others}")


def from_state(
    given: InputRef,
    state: Mapping[str, Tensor],
    spec: ModelSpec,
    side: int,
    renamed: Callable[[StateDict], StateDict] = unchanged,
) -> Checkpoint:
    """Return the checkpoint with a state dict of the network `spec`.

    side: of the latents. renamed: renames the entries to the names in the family's files. Raises
    UsageError for the state dict of another network, and for tensors that are not finite floats.
    """
    floats = floats_of(state, given)
    require_finite_floats(floats, given)
    try:
        raw = renamed(without_prefix(_tensors_of(floats)))
        checkpoint = Checkpoint(given, spec, StateTensors(raw))
        require_fit(given, checkpoint.state, spec.empty(side))
    except UsageError:
        raise
    except KeyError as missing:
        raise given.error(f"is not such a state dict: no {missing.args[0]}") from None
    except ValueError as error:
        raise given.error(str(error)) from None
    return checkpoint


def _tensors_of(state):
    """Return a state dict without torch.compile's prefixes, and without the non-tensor entries of
    quantised layers.
    """
    return {
        f"{name}.".replace("_orig_mod.", "")[:-1]: value.detach()
        for name, value in state.items()
        if torch.is_tensor(value)
    }


def _pipeline_facts(given: InputRef, pipeline: Any) -> dict[str, Any]:
    """Return the names of the classes in a pipeline, in order, () if a class has none. Raises
    UsageError for an unsupported scheduler.
    """
    scheduler: Any = getattr(pipeline, "scheduler", None)
    if hasattr(scheduler, "config"):
        require_schedule(given, {**scheduler.config, "_class_name": type(scheduler).__name__})
    labels = getattr(pipeline, "labels", None) or {}  # name → class
    names: list[list[str]] = [[] for _ in range(1 + max(labels.values(), default=-1))]
    for name, number in labels.items():
        names[number].append(name)
    return {"class_names": tuple(map(", ".join, names)) if all(names) else ()}
