"""Folders in the layout of LLaMA's training code: consolidated_ema.00-of-01.pth (moving average) or
consolidated.00-of-01.pth (weights), and model_args.pth (training arguments).
"""

import argparse
import os
from pathlib import Path

from accel.checkpoints import Contents, single_file
from accel.checkpoints.facts import arguments_of
from accel.errors import InputRef
from accel.tensors.pickles import read_pickle

# in order of preference
WEIGHTS = "consolidated_ema.00-of-01.pth", "consolidated.00-of-01.pth"
ARGUMENTS = "model_args.pth"


def matches(folder: Path) -> bool:
    """Return whether `folder` has this layout, sharded tensors included."""
    return any(name == ARGUMENTS or name.startswith("consolidated") for name in os.listdir(folder))


def read(folder: Path, given: InputRef, entry: str | None = None) -> Contents:
    """Return the state dict and the training arguments, if model_args.pth exists. Raises UsageError
    for sharded or missing weights.
    """
    names = sorted(os.listdir(folder))
    whole = [name for name in WEIGHTS if name in names]
    if not whole:
        raise given.error(
            f"contains neither {WEIGHTS[0]} nor {WEIGHTS[1]}",
            "copy them there; join parts such as consolidated.00-of-02.pth",
        )
    state, facts = single_file.read(folder / whole[0], given, entry)
    if ARGUMENTS in names:
        meaning = "the arguments of a training run"
        arguments = read_pickle(folder / ARGUMENTS, given.option, argparse.Namespace, meaning)
        facts = arguments_of({"args": arguments})
    return Contents(state, facts)
