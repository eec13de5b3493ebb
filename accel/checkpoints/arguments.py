"""The arguments of a training run beside its weights, which other programs wrote.

They may lie in sections of a configuration. What decides pictures or sizes is believed wherever
it is said, and refused where two places differ.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from accel.checkpoints.facts import OWN, is_known, is_valid
from accel.errors import Given, shown
from accel.tensors.computed import UNCLEAR, is_listed, is_suspected

# Entries with the arguments of a training run. Where two say different values of an argument that
# decides no picture, the first is believed.
ARGUMENTS = "args", "hyper_parameters", "hparams", "config", "cfg", "opt", "options"

# Sections about other networks of a run, whose sizes are not the sampled one's.
OTHER_NETWORKS = re.compile(
    r"(encoder|classifier|teacher|discriminator|tokenizer|decoder|vae|guidance)"
)
PLAIN = str, int, float, bool, list, tuple
AT_TOP = "beside the weights"
MOST_VALUES = 16  # of a tensor that is an argument
KINDS = "type", "name", "kind", "target", "value"  # in a section that stands for one argument
ALSO_CALLED = {"class_num": "num_classes"}  # arguments → our entries
OURS = "family", "recipe"  # entries that this program alone writes
# Arguments with one meaning in any section of a configuration. Others are read at the top of
# ARGUMENTS alone: model, patch_size or in_channels may be another network's. Those of `computed`
# are read everywhere too.
IN_SECTIONS = {"learn_sigma", "sigma_small"}
IN_SECTIONS |= {"image_size", "img_size", "num_classes", "num_heads", "vae"}
IN_SECTIONS |= {"enc_type", "in_context_start", "noise_scale", "t_eps", "use_nonlinear"}


def facts_of(given: Given, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts beside the tensors of a file: as the converter writes them, else a training
    run's arguments, and its configuration. Print the arguments in sections. Raises UsageError
    for an argument with two values.
    """
    facts = content.get(OWN)
    if isinstance(facts, dict) and "family" in facts:
        return facts
    merged: dict[str, Any] = {}
    for name in ARGUMENTS:
        section = _section(content.get(name))
        if not section and _may_be_section(content.get(name)):
            given.warn(f"its {name} is text that is not a JSON object, {UNCLEAR}")
        merged = {**section, **merged}
    places: dict[str, str] = {}  # of the arguments in IN_SECTIONS, with dots between sections
    in_sections: dict[str, Any] = {}
    facts = of_training({"config": content.get("config"), **merged})
    for place, name, value in _leaves(content):
        value = of_training({name: value}).get(name)
        if not isinstance(value, PLAIN):
            continue
        first = in_sections.setdefault(name, value)
        # Some programs save numbers as text.
        if value != first and str(value) != str(first):
            if name in IN_SECTIONS or is_listed(name):
                raise given.error(
                    f"says {name} {shown(first)} ({places[name]}) and {shown(value)} ({place})",
                    "save it again with one of them",
                )
            name = f"{place}.{name}"  # such as the schedule of two things
            in_sections[name] = value
        places.setdefault(name, place)
    printed = [
        f"{name} {shown(value)} ({places[name]})"
        for name, value in in_sections.items()
        if places[name] not in ARGUMENTS
    ]
    if printed:
        given.warn(f"its configuration says {shown(', '.join(printed), 300)}")
    return facts | in_sections


def _section(value: Any) -> dict[str, Any]:
    """Return a section of a configuration, which may be the text of a JSON object, or {} for
    anything else. An optimiser's state, as `opt` often is, says nothing of the network.
    """
    if isinstance(value, str) and value[:1] == "{":
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    if isinstance(value, (argparse.Namespace, SimpleNamespace)):
        value = vars(value)
    return value if isinstance(value, dict) and "param_groups" not in value else {}


def _may_be_section(value: Any) -> bool:
    """Return whether a value is text that may hold arguments: an object, or several lines."""
    return isinstance(value, str) and (value[:1] == "{" or "\n" in value.strip())


def of_function(content: Any) -> dict[str, Any]:
    """Return the arguments in sections of a configuration that may be about a network's function,
    by their places and names.
    """
    return {
        f"{place}.{name}".removeprefix(f"{AT_TOP}."): _plain(value)
        for place, name, value in _leaves(_section(content))
        if name not in IN_SECTIONS
    }


def of_training(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a training run that may be facts, as plain values. They are
    another program's: what has part of our names and another meaning is left out.
    """
    facts = {}
    for name, value in arguments.items():
        name = ALSO_CALLED.get(name, name)
        value = _plain(value)
        if not is_known(name) or name not in OURS and is_valid(name, value):
            facts[name] = value
    return facts


def _leaves(section: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (place, name, value) of the arguments of IN_SECTIONS in a section and in the sections
    inside it.
    """
    for name, value in section.items():
        path = f"{place}.{name}".replace("/", ".").lstrip(".")
        yield from _leaves(_section(value), path)
        # A flattened configuration has its sections in names.
        inside, _, last = path.rpartition(".")
        if any(map(OTHER_NETWORKS.search, inside.split("."))):
            continue
        last = ALSO_CALLED.get(last, last)
        if last in IN_SECTIONS or is_listed(last) or is_suspected(path, value):
            for part in _said_by(value):
                yield inside or AT_TOP, last, part


def _said_by(value: Any) -> list[Any]:
    """Return what an argument says: its value, of a section the names of kinds in it."""
    section = _section(value)
    return [section[name] for name in KINDS if name in section] if section else [value]


def _plain(value):
    """Return a value of a configuration without tensors, numpy's numbers, paths, lists of one
    value, and bools that are text.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (torch.Tensor, np.ndarray)) and prod(value.shape) <= MOST_VALUES:
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)) and len(value) == 1:
        return _plain(value[0])
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return value
