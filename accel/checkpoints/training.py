"""Read one file of a training script or torch.save: a state dict, or a checkpoint that
contains one.
"""

import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from accel.checkpoints import Contents
from accel.checkpoints.arguments import facts_of
from accel.checkpoints.names import INNER, network_in, prefixes_of
from accel.checkpoints.safetensors_file import prefix_in
from accel.errors import Given, UsageError, shown
from accel.families.spec import StateDict
from accel.tensors.latent_statistics import PAIRS
from accel.tensors.tensor_files import floats_of, is_counter, read_tensors

# Entries of a training checkpoint with weights, in order of preference. A name with the word "ema"
# goes before all without it.
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
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of a name such as netEMA or model_ema1
RAW = "model"  # the entry that is trained, of which others are averages
AVERAGE = "shadow_params"  # a list without names, of libraries that average parameters
# Tables that are fixed, so that an average of what is trained may leave them out.
FIXED = "pos_embed", "freqs_cos", "freqs_sin"


def holds(path: Path) -> bool:
    """Return whether `path` may be a file of tensors: anything but a folder."""
    return not path.is_dir()


def read(path: Path, given: Given, mapped: bool, entry: str | None = None) -> Contents:
    """Return the state dict and the facts that lie beside it. entry: the name of the entry with
    the weights, with a dot before that of an entry inside it, or before the prefix of the
    network's names, or this prefix alone; default: by `_rank`. Raises UsageError.
    """
    content = read_tensors(path, given.option, mapped)
    state, prefix = _chosen(given, content, entry)
    weights = network_in(given, floats_of(state, given.error), prefix)
    if state is not content:
        # Statistics of the latents lie among a network's tensors or beside them.
        weights |= {name: content[name] for name in chain(*PAIRS) if _is_vector(content.get(name))}
    return Contents(weights, facts_of(given, content))


def _is_vector(value: Any) -> bool:
    """Return whether a value is a tensor of numbers by channel."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1


def _chosen(given: Given, content: dict, entry: str | None) -> tuple[StateDict, str | None]:
    """Return the weights in the entry that the user names, else in the one that `_rank` prefers,
    and the prefix of the network's names if the user names one. Print which entry it is if there
    are others and its name is not "ema".
    """
    states = _states(content)
    if not states:
        entries = ", ".join(map(str, list(content)[:5]))
        raise given.error(f"holds no state dict of tensors (entries: {entries})")
    if entry is not None and "" in states:
        return states[""], prefix_in(given, states[""], entry)
    listed = shown(", ".join(states))
    if entry is not None:
        names = [name for name in states if f"{name}.".startswith(f"{entry}.")]
        if len(names) == 1:
            return _named(given, names[0], states), None
        inside = [name for name in states if entry.startswith(f"{name}.")]
        inside = inside or [name for name in states if _begins_names(states[name], entry)]
        if not names and inside:
            name = min(inside, key=_rank)
            state = _named(given, name, states)
            return state, prefix_in(given, state, entry.removeprefix(f"{name}."))
        raise UsageError(
            f"{given.name} has the entries {listed}", parameter="weights_entry", value=shown(entry)
        )
    fitting = [name for name in states if _may_be_network(states[name])]
    ranks = [_rank(name) for name in fitting or states]
    name = min(fitting or states, key=_rank)
    if len(states) == 1:
        if name == RAW:
            given.warn(f'holds "{RAW}" alone, without a moving average of the weights')
    elif ranks.count(min(ranks)) > 1:
        raise given.error(f"has the entries {listed}", given.give("weights_entry"))
    elif "ema" not in name.split("."):
        others = shown(", ".join(other for other in states if other != name))
        given.warn(
            f'the weights are those of "{name}", not of {others}; for those: '
            f"{given.otherwise('weights_entry', 'NAME')}"
        )
    return _named(given, name, states), None


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


def _begins_names(state: Any, prefix: str) -> bool:
    """Return whether some names of a state dict lie under a prefix."""
    return any(name.startswith(f"{prefix.rstrip('.')}.") for name in state if isinstance(name, str))


def _may_be_network(state: Any) -> bool:
    """Return whether a state dict has a network of some family. A list without names may be one."""
    return not isinstance(state, dict) or bool(prefixes_of(INNER.sub("", name) for name in state))


def _rank(name: str) -> tuple[bool, int]:
    """Return (whether an entry's name lacks the word "ema", its place in ENTRIES, their number if
    it has none). The least is preferred.
    """
    places = [ENTRIES.index(part) for part in name.split(".") if part in ENTRIES]
    is_raw = "ema" not in map(str.lower, WORDS.findall(name))
    return is_raw, min(places, default=len(ENTRIES))


def _named(given: Given, name: str, states: Mapping[str, Any]) -> StateDict:
    """Return the weights of an entry. An average without names has those of the weights that
    it is of, in their order; one without the fixed tables has theirs.
    """
    average = states[name]
    others = sorted((other for other in states if isinstance(states[other], dict)), key=_rank)
    if isinstance(average, dict):
        for other in (states[each] for each in others if each != name):
            fixed = {key: other[key] for key in other.keys() - average.keys()}
            if fixed and all(key.endswith(FIXED) for key in fixed) and _covers(other, average):
                return average | fixed
        return average
    for other in others:
        raw = {key: value for key, value in states[other].items() if not is_counter(key, value)}
        for names in (list(raw), [key for key in raw if not key.endswith(FIXED)]):
            shapes = [raw[key].shape for key in names]
            if shapes == [getattr(value, "shape", None) for value in average]:
                return raw | dict(zip(names, average))
    remedy = f"{given.give('weights_entry')}, or save" if others else "save"
    raise given.error(
        f'"{name}" is a list without names, and no other entry has such tensors in its order',
        f"{remedy} it as a state dict",
    )


def _covers(whole: StateDict, part: StateDict) -> bool:
    """Return whether all weights of `part` are in `whole`, of their shapes."""
    return all(
        key in whole and whole[key].shape == value.shape
        for key, value in part.items()
        if not is_counter(key, value)
    )
