"""Read a .safetensors file: a state dict, and the facts in its header."""

import logging
import os
import re
from pathlib import Path
from typing import Any

import torch

from accel.errors import UsageError, shown
from accel.weights import Contents
from accel.weights.metadata import from_header
from accel.weights.tensor_files import read_safetensors, require_floats

log = logging.getLogger(__name__)

WRAPPED = r"((module|_orig_mod|model|net)\.)*"  # begins all names: wrappers around the network
HOLDER = "net."  # of a wrapper that may have heads of its own beside the network, for training
# Of wrappers around parts of it: anywhere in a name.
INNER = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)[.]")

State = dict[str, torch.Tensor]


def holds(path: Path) -> bool:
    """Return whether `path` is a file of this format."""
    return path.suffix == ".safetensors" and not path.is_dir()


def read(path: Path, mapped: bool, entry: str | None = None) -> Contents:
    """Return the state dict and the facts in the header. Raises UsageError about --ckpt."""
    if entry is not None:
        raise without_entries(path, entry)
    tensors, header = read_safetensors(path, "ckpt", mapped)
    return Contents(weights_of(path, tensors), from_header(header))


def without_entries(path: Path, entry: str) -> UsageError:
    """Return the error for an entry of a file that has none."""
    return UsageError(
        f"`weights_entry={shown(entry)}`: {path} is a state dict itself, without entries; drop it"
    )


def weights_of(path: Path, state: State) -> State:
    """Return the weights in the state dict of a file, without counters and wrappers' parts of
    names. Raises UsageError about --ckpt for anything else in it.
    """
    state = {name: value for name, value in state.items() if not is_counter(name, value)}
    require_floats(state, f"`ckpt={path}`")
    return _without_wrappers(path, state)


def is_counter(name: str, value: Any) -> bool:
    """Return whether an entry of a state dict is a number that no network computes with, such
    as the steps or the decay of an average.
    """
    if not isinstance(value, torch.Tensor):
        return True
    if value.is_nested or value.layout is not torch.strided:
        return False
    whole = not value.is_floating_point() and not value.is_complex()
    # A network's own numbers are in parts of it.
    return value.ndim == 0 and "." not in name or whole and value.numel() == 1


def without_prefix(state: State) -> State:
    """Return a state dict without what wrappers around a network put before all names."""
    prefix = _prefix(state)
    return {name.removeprefix(prefix): value for name, value in state.items()}


def _prefix(state: State) -> str:
    wrapped = re.match(WRAPPED, os.path.commonprefix(list(state)))
    return wrapped[0] if wrapped else ""


def _without_wrappers(path: Path, state: State) -> State:
    """Return a state dict without the parts of names that wrappers add. Print them."""
    prefix = _prefix(state)
    plain: State = {}
    for name, value in state.items():
        short = INNER.sub("", name.removeprefix(prefix))
        first = plain.setdefault(short, value)
        if first is not value and not torch.equal(first, value):
            raise UsageError(
                f"`ckpt={path}`: has {shown(short)} and {shown(name)}, with other values; save one "
                "of them"
            )
    wrapped = [name for name in state if name not in plain]
    if wrapped:
        log.warning(
            f'{path}: has "{shown(wrapped[0])}", as a wrapped model is saved; loading without'
        )
    held = {name: value for name, value in plain.items() if name.startswith(HOLDER)}
    beside = dict.fromkeys(name.partition(".")[0] for name in plain if name not in held)
    if not held or not beside:
        return plain
    log.warning(f'{path}: the network is under "{HOLDER}"; not sampled: {shown(", ".join(beside))}')
    return {name.removeprefix(HOLDER): value for name, value in held.items()}
