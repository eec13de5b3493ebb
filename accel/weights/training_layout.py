"""Read one file of a training script or torch.save: a state dict, or a checkpoint that
contains one.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from accel.errors import UsageError, shown
from accel.weights import Contents
from accel.weights.safetensors_layout import State, is_counter, weights_of, without_entries
from accel.weights.tensor_files import read_tensors
from accel.weights.training_arguments import facts_of

log = logging.getLogger(__name__)

# Entries of a training checkpoint with weights. The first that is there is sampled.
ENTRIES = (
    "ema",
    "model_ema1",
    "model",
    "state_dict",
    "model_state_dict",
    "module",
    "shadow_params",
    "model_ema",
    "ema_model",
    "ema_state_dict",
    "net",
    "weights",
)
RAW = "model"  # the entry that is trained, of which others are averages
AVERAGE = "shadow_params"  # a list without names, of libraries that average parameters
TABLE = "pos_embed"  # fixed, so that an average of what is trained may leave it out


def holds(path: Path) -> bool:
    """Return whether `path` may be a file of tensors: anything but a folder."""
    return not path.is_dir()


def read(path: Path, mapped: bool, entry: str | None = None) -> Contents:
    """Return the state dict and the facts that lie beside it. entry: the name of the entry with
    the weights, with a dot before that of an entry inside it; default: the first of ENTRIES.
    Raises UsageError about --ckpt.
    """
    content = read_tensors(path, "ckpt", mapped)
    return Contents(weights_of(path, _chosen(path, content, entry)), facts_of(path, content))


def _chosen(path: Path, content: dict, entry: str | None) -> State:
    """Return the weights in the entry that the user names, else in the first of ENTRIES.
    Print which one it is if there are others and it is not the usual one.
    """
    states = _states(content)
    if not states:
        entries = ", ".join(map(str, list(content)[:5]))
        raise UsageError(f"`ckpt={path}`: holds no state dict of tensors (entries: {entries})")
    listed = shown(", ".join(states))
    if entry is not None:
        if "" in states:
            raise without_entries(path, entry)
        names = [name for name in states if f"{name}.".startswith(f"{entry}.")]
        if len(names) != 1:
            raise UsageError(f"`weights_entry={shown(entry)}`: {path} has the entries {listed}")
        return _named(path, names[0], states)
    name = min(states, key=_rank)
    if len(states) == 1:
        if name == RAW:
            log.warning(f'{path}: holds "{RAW}" alone, without a moving average of the weights')
    elif _rank(name) == len(ENTRIES):
        raise UsageError(f"`ckpt={path}`: has the entries {listed}; give `weights_entry`")
    elif _rank(name) > 0:
        others = shown(", ".join(other for other in states if other != name))
        log.warning(
            f'{path}: the weights are those of "{name}", not of {others}; for those: '
            "--weights-entry NAME"
        )
    return _named(path, name, states)


def _states(content: dict) -> dict[str, Any]:
    """Return the state dicts of a file by the names of their entries, of the file itself by
    "". An average without names is a list.
    """
    if _is_state(content):
        return {"": content}
    states = {}
    for name, value in content.items():
        inside = value if isinstance(value, dict) and not _is_state(value) else {"": value}
        for part, state in inside.items():
            is_average = AVERAGE in (name, part) and isinstance(state, (list, tuple))
            if is_average or _is_state(state):
                states[f"{name}.{part}".rstrip(".")] = state
    return states


def _is_state(value: Any) -> bool:
    """Return whether a value is a state dict: tensors by name, counters among them."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        return False
    values = list(value.values())
    tensors = [item for item in values if isinstance(item, torch.Tensor)]
    plain = [item for item in values if isinstance(item, (int, float, str, type(None)))]
    has_weights = any(item.ndim and item.is_floating_point() for item in tensors)
    return has_weights and len(tensors) + len(plain) == len(values)


def _rank(name: str) -> int:
    """Return the place of an entry's name in ENTRIES, their number if it has none."""
    places = [ENTRIES.index(part) for part in name.split(".") if part in ENTRIES]
    return min(places, default=len(ENTRIES))


def _named(path: Path, name: str, states: Mapping[str, Any]) -> State:
    """Return the weights of an entry. An average without names has those of the weights that
    it is of, in their order.
    """
    average = states[name]
    if isinstance(average, dict):
        return average
    others = sorted((other for other in states if isinstance(states[other], dict)), key=_rank)
    for other in others:
        raw = {key: value for key, value in states[other].items() if not is_counter(key, value)}
        for names in (list(raw), [key for key in raw if not key.endswith(TABLE)]):
            shapes = [raw[key].shape for key in names]
            if shapes == [getattr(value, "shape", None) for value in average]:
                return raw | dict(zip(names, average))
    remedy = "give `weights_entry`, or save" if others else "save"
    raise UsageError(
        f'`ckpt={path}`: "{name}" is a list without names, and no other entry has such tensors in '
        f"its order; {remedy} it as a state dict"
    )
