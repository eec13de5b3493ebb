"""Read a file of torch.save: a state dict, or a training checkpoint that contains one."""

import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from accel.checkpoints import Contents
from accel.checkpoints.arguments import arguments_of
from accel.checkpoints.facts import OWN
from accel.checkpoints.names import INNER, network_in, prefixes_of
from accel.checkpoints.safetensors_file import prefix_in
from accel.errors import InputRef, UsageError, shown
from accel.families.spec import StateDict
from accel.tensors.latent_statistics import PAIRS
from accel.tensors.tensor_files import floats_of, is_counter, read_tensors

# Entries with weights in a training checkpoint, in order of preference. Names with the word "ema"
# come first.
ENTRIES = (
    "ema",
    "model_ema1",
    "model",
    "state_dict",
    "model_state_dict",
    "module",
    "model_ema",
    "ema_model",
    "ema_state_dict",
    "net",
    "weights",
)
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # in a name such as netEMA or model_ema1
RAW = "model"  # the trained weights, without averaging
# Tables that are not trained: an average of parameters may lack them.
FIXED = "pos_embed", "freqs_cos", "freqs_sin"


def matches(path: Path) -> bool:
    """Return whether `path` is a file, not a folder."""
    return not path.is_dir()


def read(path: Path, given: InputRef, mapped: bool, entry: str | None = None) -> Contents:
    """Return the state dict and the metadata. Raises UsageError.

    entry: the entry with the weights. It can be nested ("a.b"), followed by a prefix of the
    network's names ("ema.net"), or only that prefix. Default: the first by `_rank`.
    """
    content = read_tensors(path, given.option, mapped)
    states = _states(content)
    if not states:
        entries = ", ".join(map(str, list(content)[:5]))
        raise given.error(f"has no state dict of tensors (entries: {entries})")
    if "" in states:
        name = ""
        prefix = prefix_in(given, content, entry)
    elif entry is None:
        name = _preferred(given, states)
        prefix = None
    else:
        name, prefix = _named(given, states, entry)
    state = _with_fixed_tables(name, states)
    weights = network_in(given, floats_of(state, given), prefix)
    if name:
        # Latent statistics can be stored with the network's tensors or next to them.
        weights |= {name: content[name] for name in chain(*PAIRS) if _is_vector(content.get(name))}
    own = content.get(OWN)
    if isinstance(own, dict) and "family" in own:
        return Contents(weights, own)
    return Contents(weights, arguments_of(content))


def _is_vector(value: Any) -> bool:
    """Return whether a value is a tensor with one number per channel."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1


def _preferred(given: InputRef, states: Mapping[str, StateDict]) -> str:
    """Return the first entry with a network by `_rank`. Print a notice if it is not the moving
    average. Raises UsageError if two entries rank first.
    """
    networks = [name for name in states if prefixes_of(INNER.sub("", key) for key in states[name])]
    first, *others = sorted(networks or states, key=_rank)
    if others and _rank(others[0]) == _rank(first):
        raise given.error(
            f"has the entries {', '.join(states)}", given.override_hint("weights_entry")
        )
    if [*states] == [RAW]:
        given.warn(f'has "{RAW}" only, without a moving average of the weights')
    elif len(states) > 1 and "ema" not in first.split("."):
        listed = shown(", ".join(name for name in states if name != first))
        given.warn(
            f'the weights are those of "{first}", not of {listed}; for those: '
            f"{given.override_hint('weights_entry', 'NAME')}"
        )
    return first


def _named(given: InputRef, states: Mapping[str, StateDict], entry: str) -> tuple[str, str | None]:
    """Split the user's entry. Return the name of the entry, and the prefix of tensor names or None.
    Raises UsageError if there is none.
    """
    names = [name for name in states if f"{name}.".startswith(f"{entry}.")]
    if len(names) == 1:
        return names[0], None
    for name in sorted(states, key=_rank):
        prefix = entry.removeprefix(f"{name}.").rstrip(".") + "."
        if any(key.startswith(prefix) for key in states[name]):
            return name, prefix
    raise UsageError(
        f"{given.name} has the entries {shown(', '.join(states))}",
        parameter="weights_entry",
        value=shown(entry),
    )


def _states(content: dict) -> dict[str, StateDict]:
    """Return the state dicts in a file by entry; "" if the file itself is a state dict."""
    if _is_state(content):
        return {"": content}
    states = {}
    for name, value in content.items():
        inside = value if isinstance(value, dict) and not _is_state(value) else {"": value}
        for part, state in inside.items():
            if _is_state(state):
                states[f"{name}.{part}".rstrip(".")] = state
    return states


def _is_state(value: Any) -> bool:
    """Return whether a value is a state dict: tensors by name, counters included."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        return False
    values = list(value.values())
    tensors = [item for item in values if isinstance(item, torch.Tensor)]
    plain = [item for item in values if isinstance(item, (int, float, str, type(None)))]
    has_weights = any(item.ndim and item.is_floating_point() for item in tensors)
    return has_weights and len(tensors) + len(plain) == len(values)


def _rank(name: str) -> tuple[bool, int]:
    """Return the sort key of an entry: names with the word "ema" first, then by ENTRIES."""
    places = [ENTRIES.index(part) for part in name.split(".") if part in ENTRIES]
    is_raw = "ema" not in map(str.lower, WORDS.findall(name))
    return is_raw, min(places, default=len(ENTRIES))


def _with_fixed_tables(name: str, states: Mapping[str, StateDict]) -> StateDict:
    """Return the weights of an entry. If an average lacks the fixed tables, take them from the
    averaged weights.
    """
    average = states[name]
    for other in (states[each] for each in sorted(states, key=_rank)):
        fixed = {key: other[key] for key in other.keys() - average.keys()}
        if fixed and all(key.endswith(FIXED) for key in fixed) and _covers(other, average):
            return average | fixed
    return average


def _covers(whole: StateDict, part: StateDict) -> bool:
    """Return whether `whole` has all weights of `part`, with the same shapes."""
    return all(
        key in whole and whole[key].shape == value.shape
        for key, value in part.items()
        if not is_counter(key, value)
    )
