"""The arguments of a training run beside its weights, which other programs wrote.

They may lie in sections of a configuration. What decides pictures or sizes is believed wherever
it is said, and refused where two places differ.
"""

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from accel.errors import UsageError, shown
from accel.weights.computed import is_read_anywhere
from accel.weights.metadata import OWN, SCHEMA

log = logging.getLogger(__name__)

# Entries with the arguments of a training run. Where two say different values of an argument that
# decides no picture, the first is believed.
ARGUMENTS = "args", "hyper_parameters", "hparams", "config", "cfg", "opt", "options"

PLAIN = str, int, float, bool, list, tuple
MOST_VALUES = 16  # of a tensor that is an argument
ALSO_CALLED = {"class_num": "num_classes"}  # arguments → our entries
OURS = "family", "recipe"  # entries that this program alone writes
# Arguments with one meaning in any section of a configuration. Others are read at the top of
# ARGUMENTS alone: model, patch_size or in_channels may be another network's. Those of `computed`
# are read everywhere too.
IN_SECTIONS = {"learn_sigma", "sigma_small"}
IN_SECTIONS |= {"image_size", "img_size", "num_classes", "num_heads", "vae"}
IN_SECTIONS |= {"enc_type", "in_context_start", "noise_scale", "t_eps", "use_nonlinear"}


def facts_of(path: Path, content: dict) -> dict[str, Any]:
    """Return the facts beside the tensors of a file: as the converter writes them, else a training
    run's arguments, and its configuration. Print the arguments in sections. Raises UsageError
    for an argument with two values.
    """
    facts = content.get(OWN)
    if isinstance(facts, dict) and "family" in facts:
        return facts
    merged: dict[str, Any] = {}
    for name in ARGUMENTS:
        merged = {**_section(content.get(name)), **merged}
    places: dict[str, str] = {}  # of the arguments in IN_SECTIONS, with dots between sections
    in_sections: dict[str, Any] = {}
    try:
        facts = of_training({"config": content.get("config"), **merged})
        for place, name, value in _leaves(content):
            value = of_training({name: value}).get(name)
            if not isinstance(value, PLAIN):
                continue
            first = in_sections.setdefault(name, value)
            # Some programs save numbers as text.
            if value != first and str(value) != str(first):
                raise UsageError(
                    f"`ckpt={path}`: says {name} {shown(first)} ({places[name]}) and "
                    f"{shown(value)} ({place}); save it again with one of them"
                )
            places.setdefault(name, place)
    except RecursionError:
        raise UsageError(
            f"`ckpt={path}`: its training arguments contain themselves; save it again without them"
        ) from None
    printed = [
        f"{name} {shown(value)} ({places[name]})"
        for name, value in in_sections.items()
        if places[name] not in ARGUMENTS
    ]
    if printed:
        log.warning(f"{path}: its configuration says {shown(', '.join(printed), 300)}")
    return facts | in_sections


def _section(value: Any) -> dict[str, Any]:
    """Return a section of a configuration, or {} for anything else. An optimiser's state, as
    `opt` often is, says nothing of the network.
    """
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    return value if isinstance(value, dict) and "param_groups" not in value else {}


def of_training(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a training run that may be facts, as plain values. They are
    another program's: what has part of our names and another meaning is left out.
    """
    facts = {}
    for name, value in arguments.items():
        name = ALSO_CALLED.get(name, name)
        value = _plain(value)
        if name not in SCHEMA or name not in OURS and SCHEMA[name].valid(value):
            facts[name] = value
    return facts


def _leaves(section: dict, place: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (place, name, value) of the arguments of IN_SECTIONS in a section and in the sections
    inside it.
    """
    for name, value in section.items():
        path = f"{place}.{name}".replace("/", ".").lstrip(".")
        yield from _leaves(_section(value), path)
        # A flattened configuration has its sections in names.
        inside, _, last = path.rpartition(".")
        last = ALSO_CALLED.get(last, last)
        if last in IN_SECTIONS or is_read_anywhere(last):
            yield inside or "beside the weights", last, value


def _plain(value):
    """Return a value of a configuration without tensors, numpy's numbers, paths, lists of one
    value, and bools that are text.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, torch.Tensor) and not value.is_nested and value.numel() <= MOST_VALUES:
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
