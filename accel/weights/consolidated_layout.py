"""Folders of LLaMA's training: consolidated_ema.00-of-01.pth (moving average) or
consolidated.00-of-01.pth (weights), and model_args.pth (arguments of the run).
"""

import os
import re
from pathlib import Path

from accel.errors import UsageError
from accel.weights import Contents, training_layout
from accel.weights.pickles import read_namespace

# the first that is there is used
WEIGHTS = "consolidated_ema.00-of-01.pth", "consolidated.00-of-01.pth"
ARGUMENTS = "model_args.pth"
PART = re.compile(r"consolidated\w*\.\d+-of-(\d+)\.pth")


def holds(folder: Path) -> bool:
    """Return whether `folder` is of such a run, parts of tensors included."""
    return any(name == ARGUMENTS or name.startswith("consolidated") for name in os.listdir(folder))


def read(folder: Path, mapped: bool, entry: str | None = None) -> Contents:
    """Return the state dict and the arguments of the run, nothing if their file is not there.
    Raises UsageError about --ckpt.
    """
    whole = [folder / name for name in WEIGHTS if (folder / name).exists()]
    parts = [part for part in map(PART.fullmatch, sorted(os.listdir(folder))) if part]
    if not whole and parts:
        world = int(parts[0][1])
        raise UsageError(
            f"`ckpt={folder}`: {parts[0][0]} holds a part of each tensor, for {world} processes; "
            f"join them to {WEIGHTS[0]}"
        )
    if not whole:
        raise UsageError(
            f"`ckpt={folder}`: holds neither {WEIGHTS[0]} nor {WEIGHTS[1]}; copy the weights there"
        )
    state, _ = training_layout.read(whole[0], mapped, entry)
    if not (folder / ARGUMENTS).exists():
        return Contents(state, {})
    return Contents(state, training_layout.of_training(read_namespace(folder / ARGUMENTS, "ckpt")))
