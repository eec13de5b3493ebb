"""Files of tensors and JSON that a user names: read safely, and every failure is one line
about the parameter.

Nothing in a file is ever executed, a pipe or a device is never opened, and tensors are
memory-mapped where the format allows it.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from accel.errors import Mistake, UsageError, about, path_errors, shown
from accel.io.filesystem import is_utf8, open_regular
from accel.io.filesystem import read_json as read_object
from accel.tensors.shapes import SHARD_ERROR

Tensors = dict[str, torch.Tensor]
HUB_ID = re.compile(r"[\w.-]+/[\w.-]*[^\W\d][\w.-]*")  # owner/name, unlike DiT-XL/2
FILE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
# The weights of a folder in diffusers' layout, beside its config.json.
WEIGHTS = "diffusion_pytorch_model.safetensors"
PICKLED_WEIGHTS = "diffusion_pytorch_model.bin"


def mode_of(path: Path, parameter: str) -> int:
    """Return st_mode of `path`, 0 if nothing is there. Raises UsageError where
    permissions or the name forbid it.
    """
    with path_errors(parameter, path):
        try:
            return path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return 0


def read_tensors(path: Path, parameter: str, mapped: bool = True) -> dict:
    """Return the content of a .safetensors file or a pickle (.pt, .ckpt, .bin), on the
    CPU; mapped: not copied, where the format allows it. Raises UsageError about
    `parameter`.
    """
    if path.suffix == ".safetensors":
        return read_safetensors(path, parameter, mapped)[0]
    from accel.tensors.pickles import read_pickle

    return read_pickle(path, parameter, dict, "a state dict", mapped)


def read_safetensors(
    path: Path, parameter: str, mapped: bool = True
) -> tuple[Tensors, dict[str, str]]:
    """Return the tensors and the header of a .safetensors file; mapped: as for `read_tensors`.
    Raises UsageError about `parameter`.
    """
    from safetensors import SafetensorError, safe_open

    error = about(parameter, path)
    if not is_utf8(path):
        raise error("has a name that is not UTF-8, which safetensors does not open", "rename it")
    with path_errors(parameter, path):
        open_regular(path).close()  # safetensors has errors of its own for pipes and permissions
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                header = dict(file.metadata() or {})
        except (SafetensorError, OSError, ValueError, KeyError) as reason:
            words = str(reason).splitlines()[0][:120]
            raise error(f"truncated or not safetensors ({words})", "copy it again") from None
    if not mapped:
        tensors = {name: value.clone() for name, value in tensors.items()}
    return tensors, header


def weight_files(folder: Path, parameter: str) -> list[Path]:
    """Return the weights beside a config.json: one file, or shards; .safetensors rather
    than .bin. Raises UsageError.
    """
    error = about(parameter, folder)
    with path_errors(parameter, folder):
        names = os.listdir(folder)
    for plain in (WEIGHTS, PICKLED_WEIGHTS):
        index = f"{plain}.index.json"
        indices = [name for name in names if name.startswith(f"{plain}.index.")]
        if plain not in names and len(indices) == 1:
            index = indices[0]  # also a variant's, such as fp16's
        if index in names:
            shards = read_json(folder / index, parameter).get("weight_map")
            listed = {str(name) for name in shards.values()} if isinstance(shards, dict) else set()
            missing = ", ".join(sorted(listed - set(names)))  # a name with a slash is never there
            if missing or not listed:
                raise error(f"lacks {missing or 'the files'} that {index} names", "copy it again")
            return [folder / name for name in sorted(listed)]
        if plain in names and "config.json" in names:
            return [folder / plain]
    others = sorted(name for name in names if name.endswith(".safetensors"))
    if len(others) > 1:
        raise error(f"{', '.join(others)} conflict", "keep one of them")
    if not others or "config.json" not in names:
        raise error(f"must hold config.json and {WEIGHTS}")
    return [folder / others[0]]


def read_json(path: Path, parameter: str) -> dict:
    """Return the object in a JSON file. Raises UsageError about `parameter`."""
    with path_errors(parameter, path):
        try:
            return read_object(path)
        except UsageError:
            raise
        except ValueError:
            raise about(parameter, path)("is not a JSON object", "copy it again") from None


def floats_of(state: Mapping[str, Any], error: Mistake) -> Tensors:
    """Return a state dict without counters. Raises `error` for anything else than whole tensors of
    floats.
    """
    floats = {}
    for name, value in state.items():
        if is_counter(name, value):
            continue
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise error(
                f"{shown(name)} is {kind}", "weights are tensors of floats, save them as such"
            )
        if hasattr(value, "full_tensor"):
            raise error(*SHARD_ERROR)
        floats[name] = value
    return floats


def is_counter(name: str, value: Any) -> bool:
    """Return whether an entry of a state dict is a number that no network computes with, such
    as the steps or the decay of an average.
    """
    if not isinstance(value, torch.Tensor):
        return True
    whole = not value.is_floating_point() and not value.is_complex()
    # A network's own numbers are in parts of it.
    return value.ndim == 0 and "." not in name or whole and value.numel() == 1


def require_finite_floats(state: Tensors, error: Mistake) -> None:
    """Raise `error` for a tensor with an infinity or NaN. It reads them all."""
    for name, tensor in state.items():
        if not tensor.float().isfinite().all():  # float8 has no isfinite
            raise error(f"{shown(name)} has values that are not finite", "check the weights")


def file_stamps(files: Iterable[Path], parameter: str) -> list[tuple]:
    """Return (path, size, mtime, inode, ctime) of each file: another version of it has
    another stamp.
    """
    stamps = []
    for file in files:
        with path_errors(parameter, file):
            status = file.stat()
        stamps.append(
            (
                str(file.absolute()),
                status.st_size,
                status.st_mtime_ns,
                status.st_ino,
                status.st_ctime_ns,
            )
        )
    return stamps
