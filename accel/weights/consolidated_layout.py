"""Folders as Large-DiT's training leaves them: consolidated_ema.00-of-01.pth, the moving average of the weights, or
consolidated.00-of-01.pth, the weights, and model_args.pth, the arguments of the run."""

import re
from collections.abc import Container
from pathlib import Path

from accel.errors import UsageError
from accel.weights.identity import QK_NORM
from accel.weights.tensor_files import read_namespace

WEIGHTS = "consolidated_ema.00-of-01.pth", "consolidated.00-of-01.pth"  # the first that is there is used
ARGUMENTS = "model_args.pth"
PART = re.compile(r"consolidated\w*\.\d+-of-(\d+)\.pth")


def weights_of(folder: Path) -> Path:
    """The file of weights in `folder`. Raises UsageError if there is none, or only parts of tensors."""
    whole = [folder / name for name in WEIGHTS if (folder / name).exists()]
    if whole:
        return whole[0]
    parts = sorted(file.name for file in folder.iterdir() if PART.fullmatch(file.name))
    if parts:
        raise UsageError(
            f"--ckpt {folder}: {parts[0]} holds a part of each tensor, for {int(PART.fullmatch(parts[0])[1])} "
            f"processes; join the parts to {WEIGHTS[0]}"
        )
    raise UsageError(f"--ckpt {folder}: holds neither {WEIGHTS[0]} nor {WEIGHTS[1]}; copy the weights there")


def arguments_of(folder: Path) -> dict:
    """The arguments of the run; nothing if the file is not there: the user's flags then say it all."""
    return read_namespace(folder / ARGUMENTS, "--ckpt") if (folder / ARGUMENTS).exists() else {}


def require_match(folder: Path, weights: Container[str]) -> None:
    """Raise UsageError if the arguments are those of another run than the weights, whose names are given."""
    said, has = bool(arguments_of(folder).get("qk_norm", QK_NORM in weights)), QK_NORM in weights
    if said != has:
        raise UsageError(
            f"--ckpt {folder}: {ARGUMENTS} says {'qk_norm' if said else 'no qk_norm'}, and the weights "
            f"{'have it' if has else 'have none'}; they are of two runs: copy the folder again, or remove {ARGUMENTS}"
        )
