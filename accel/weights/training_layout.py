"""Read one file of a training script or torch.save: a state dict, or a checkpoint that
contains one.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from accel.errors import UsageError, shown
from accel.weights.metadata import OWN, from_header
from accel.weights.tensor_files import read_safetensors, read_tensors, require_floats

# of a training checkpoint; the first that is there is used
ENTRIES = ("ema", "model", "state_dict")
PREFIXES = ("module.", "_orig_mod.", "model.")  # of wrappers around the trained network
AVERAGES = "n_averaged"  # torch's AveragedModel counts in it


def holds(path: Path) -> bool:
    """Return whether `path` may be a file of tensors: anything but a folder."""
    return not path.is_dir()


def read(path: Path, mapped: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return (state dict, the facts that lie beside it). Raises UsageError about --ckpt."""
    if path.suffix == ".safetensors":
        content, header = read_safetensors(path, "ckpt", mapped)
        facts = from_header(header)
    else:
        content = read_tensors(path, "ckpt", mapped)
        facts = _facts(content)
    entry = next((entry for entry in ENTRIES if isinstance(content.get(entry), dict)), None)
    state = content[entry] if entry else content
    if not _is_state(state):
        entries = ", ".join(map(str, list(state)[:5]))
        raise UsageError(f"`ckpt={path}`: holds no state dict of tensors (entries: {entries})")
    state = {name: value for name, value in state.items() if name != AVERAGES}
    require_floats(state, f"`ckpt={path}`")
    others = [str(name) for name, value in content.items() if name != entry and _is_state(value)]
    if entry != ENTRIES[0] and others:
        print(f'{path}: the weights are those of "{entry}", not of {shown(", ".join(others))}')
    prefix = ""
    while found := [
        one for one in PREFIXES if all(name.startswith(prefix + one) for name in state)
    ]:
        prefix += found[0]
    if prefix:
        print(
            f'{path}: every name begins with "{prefix}", as a wrapped model is saved; loading '
            "without it"
        )
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}, facts


def _is_state(value):
    return (
        isinstance(value, dict)
        and len(value) > 0
        and all(isinstance(one, torch.Tensor) for one in value.values())
    )


def _facts(content):
    """Return the facts beside the tensors: as the converter writes them, else a training
    run's arguments.
    """
    found = content.get(OWN) or content.get("args")
    found = vars(found) if isinstance(found, argparse.Namespace) else found
    return found if isinstance(found, dict) else {"config": content.get("config")}
