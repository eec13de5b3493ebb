"""Load a file, a folder, a hub id, a module or a state dict as a `Checkpoint`.

loading.py opens files, folders and hub ids; each file format in FORMATS has a module. module.py
reads modules and state dicts. Once opened, all checkpoints look the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel.checkpoints.facts import checked, interpreted, yaml_arguments
from accel.errors import InputRef, UsageError
from accel.families.identify import (
    NO_USER_FACTS,
    UserFacts,
    choose_family,
    classes_of,
    family_notice,
    flags_of,
    identify,
    print_assumptions,
    require_user_facts,
)
from accel.families.spec import ModelSpec, StateDict
from accel.runtime.network import Batch, BlockNetwork, EagerNetwork
from accel.runtime.precision import TIERS
from accel.tensors.shapes import shapes_of
from accel.tensors.tables import POSITION_TABLE, require_sinusoid

if TYPE_CHECKING:  # the first two import this module; lazy: only for accelerated tiers
    from accel.checkpoints.loading import WeightFiles
    from accel.checkpoints.module import StateTensors
    from accel.kernels.linear import Tuner


class Contents(NamedTuple):
    """The contents of a file or folder: float tensors by name, and facts."""

    state: StateDict
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a network.

    given: the user's name for them. spec: the network. tensors: of a file or a module, read-only,
    under the names in the family's files.
    family_notice: that the family is an assumption, "" if it is certain.
    """

    given: InputRef
    spec: ModelSpec
    tensors: "WeightFiles | StateTensors"
    family_notice: str = ""

    @property
    def name(self) -> str:
        """Return the user's name for the weights."""
        return self.given.name

    @property
    def state(self) -> StateDict:
        """Return the tensors under the reference network's names, on their own device."""
        return self.spec.family.weights.convert(self.tensors.state)

    def build(
        self,
        tier: str,
        device: torch.device,
        batch: Batch | None = None,
        tuner: "Tuner | None" = None,
    ) -> BlockNetwork:
        """Build the network of a tier with a copy of the weights, without tuning and checks. Free a
        file's tensors.

        fp32 and tf32 run the reference network, the other tiers an accelerated one. batch: the
        evaluations whose kernels are compiled, and the latents' side; default: nothing is compiled,
        and the latents have the trained side. Raises UsageError if the file changed since it was
        opened, if the tier cannot represent the weights, or if another size needs a trained
        position table.
        """
        family = self.spec.family
        model: Any = self.spec.empty(batch and batch.side)
        with self.tensors.reading() as tensors:
            state = family.weights.convert(tensors)
            table = state.get(POSITION_TABLE)
            if table is not None and table.shape != model.pos_embed.shape:
                require_sinusoid(self.given, table, "sample at the size that it was trained at")
                state = {**state, POSITION_TABLE: model.position_table()}
            if TIERS[tier].accelerated:
                pack = family.pack
                from accel import fast  # lazy: imports Triton

                try:
                    if batch is None:
                        return fast.build(state, model, pack, tier, device)
                    return fast.load(state, model, pack, tier, device, prod(batch.rows[0]), tuner)
                except UsageError:
                    raise
                except ValueError as error:
                    raise self.given.error(str(error)) from None
            # Converted on the device: no float32 copy on the CPU. Strides would affect rounding.
            state = {
                name: value.to(device, copy=True).float().contiguous()
                for name, value in state.items()
            }
        model.load_state_dict(state, strict=True, assign=True)
        return EagerNetwork(model.eval().requires_grad_(False))

    def digest(self) -> str:
        """Return a hash of the network's function: of its tensors, and of facts that change it."""
        return self.spec.digest(self.tensors.digest())


def checkpoint_of(
    given: InputRef,
    tensors: "WeightFiles | StateTensors",
    facts: Mapping[str, Any],
    user_facts: UserFacts = NO_USER_FACTS,
    path: Path | None = None,
) -> Checkpoint:
    """Identify the network in a file or folder. Print notices about assumed values.

    facts: metadata that this program or a pipeline wrote, with the family's name, or else the
    arguments of a training run. path: of the weights, next to which some families' programs write
    their arguments. Raises UsageError if no family matches, or for an unsupported value.
    """
    shapes = shapes_of(tensors.state)
    family, *others = choose_family(given, shapes, facts, user_facts)
    weights = family.weights
    file = ""
    if "family" not in facts:
        if path and weights.has_yaml_file and facts.keys().isdisjoint(weights.arguments):
            file, facts = yaml_arguments(path, given)
        facts = interpreted(given, facts, weights, file)
    facts = checked(given, facts)
    if "schedule" in facts:
        from accel.sampling.solvers import require_schedule  # lazy import: only for pipelines

        require_schedule(given, facts["schedule"])
    if weights.labels not in shapes:
        raise given.error(f"is not a {family.name}: no {weights.labels}")
    classes = classes_of(given, shapes[weights.labels][0], facts, user_facts)
    heads = {} if user_facts.num_heads is None else {"num_heads": user_facts.num_heads}
    chosen = {**heads, **facts, "num_classes": classes, "specified_in": file}
    spec = identify(given, tensors.state, chosen, family)
    require_user_facts(given, spec, user_facts)
    named = facts.get("model", spec.model)
    if file and named != spec.model and {named, spec.model} <= spec.family.models.keys():
        raise given.error(f"{file} describes {named}, and the weights are {spec.model}", "move it")
    print_assumptions(given, spec, facts, user_facts)
    notice = family_notice(family, flags_of(given, spec, others)) if others else ""
    return Checkpoint(given, spec, tensors, notice)
