"""Read the user's tensor and JSON files safely; errors name the parameter.

No code in a file is executed, pipes and devices are not opened, and tensors are memory-mapped
if the format allows it.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from accel.errors import InputRef, UsageError, path_errors, shown
from accel.io.filesystem import is_utf8, open_regular
from accel.io.filesystem import read_json as read_object
from accel.tensors.shapes import SHARD_ERROR

Tensors = dict[str, torch.Tensor]
HUB_ID = re.compile(r"[\w.-]+/[\w.-]*[^\W\d][\w.-]*")  # owner/name, unlike DiT-XL/2
FILE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
# Weights in a folder of diffusers' layout, next to config.json.
WEIGHTS = "diffusion_pytorch_model.safetensors"
PICKLED_WEIGHTS = "diffusion_pytorch_model.bin"


def mode_of(path: Path, parameter: str) -> int:
    """Return st_mode of `path`, or 0 if it does not exist. Raises UsageError if permissions or the
    name prevent it.
    """
    with path_errors(parameter, path):
        try:
            return path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return 0


def read_tensors(path: Path, parameter: str) -> dict:
    """Read a .safetensors file or a pickle (.pt, .ckpt, .bin) onto the CPU. Raises UsageError about
    `parameter`.
    """
    if path.suffix == ".safetensors":
        return read_safetensors(path, parameter)[0]
    from accel.tensors.pickles import read_pickle

    return read_pickle(path, parameter, dict, "a state dict")


def read_safetensors(path: Path, parameter: str) -> tuple[Tensors, dict[str, str]]:
    """Read tensors and metadata of a .safetensors file. Raises UsageError about `parameter`."""
    from safetensors import SafetensorError, safe_open

    given = InputRef(str(path), parameter)
    if not is_utf8(path):
        raise given.error(
            "has a name that is not UTF-8, which safetensors does not open", "rename it"
        )
    with path_errors(parameter, path):
        open_regular(path).close()  # safetensors' errors for pipes are unclear
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                header = dict(file.metadata() or {})
        except (SafetensorError, OSError, ValueError, KeyError) as reason:
            first_line = str(reason).splitlines()[0][:120]
            raise given.error(
                f"truncated or not safetensors ({first_line})", "copy it again"
            ) from None
    return tensors, header


def weight_files(folder: Path, parameter: str) -> list[Path]:
    """Return the weights next to config.json: one file or several shards, .safetensors in
    preference to .bin. Raises UsageError.
    """
    given = InputRef(str(folder), parameter)
    with path_errors(parameter, folder):
        names = os.listdir(folder)
    for plain in (WEIGHTS, PICKLED_WEIGHTS):
        index = f"{plain}.index.json"
        indices = [name for name in names if name.startswith(f"{plain}.index.")]
        if plain not in names and len(indices) == 1:
            index = indices[0]  # possibly of a variant such as fp16
        if index in names:
            shards = read_json(folder / index, parameter).get("weight_map")
            listed = {str(name) for name in shards.values()} if isinstance(shards, dict) else set()
            missing = ", ".join(sorted(listed - set(names)))  # names with a slash are refused, too
            if missing or not listed:
                raise given.error(
                    f"lacks {missing or 'the files'} that {index} names", "copy it again"
                )
            return [folder / name for name in sorted(listed)]
        if plain in names and "config.json" in names:
            return [folder / plain]
    candidates = sorted(name for name in names if name.endswith(".safetensors"))
    if len(candidates) > 1:
        raise given.error(f"{', '.join(candidates)} conflict", "keep one of them")
    if not candidates or "config.json" not in names:
        raise given.error(f"must contain config.json and {WEIGHTS}")
    return [folder / candidates[0]]


def read_json(path: Path, parameter: str) -> dict:
    """Read an object from a JSON file. Raises UsageError about `parameter`."""
    with path_errors(parameter, path):
        try:
            return read_object(path)
        except UsageError:
            raise
        except ValueError:
            raise InputRef(str(path), parameter).error(
                "is not a JSON object", "copy it again"
            ) from None


def floats_of(state: Mapping[str, Any], given: InputRef) -> Tensors:
    """Drop bookkeeping from a state dict, such as the number of steps or the decay of a moving
    average. Raises UsageError for tensors that are sharded or not of floats.
    """
    floats = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        is_integer = not value.is_floating_point() and not value.is_complex()
        # A network's scalars are in submodules, so their names have a dot.
        if value.ndim == 0 and "." not in name or is_integer and value.numel() == 1:
            continue
        if not value.is_floating_point():
            raise given.error(
                f"{shown(name)} is {value.dtype}",
                "weights are tensors of floats, save them as such",
            )
        if hasattr(value, "full_tensor"):
            raise given.error(*SHARD_ERROR)
        floats[name] = value
    return floats


def require_finite_floats(state: Tensors, given: InputRef) -> None:
    """Raise UsageError if a tensor contains an infinity or NaN. Reads all tensors."""
    for name, tensor in state.items():
        if not tensor.float().isfinite().all():  # float8 has no isfinite
            raise given.error(f"{shown(name)} has values that are not finite", "check the weights")


def file_stamps(files: Iterable[Path], parameter: str) -> list[tuple]:
    """Return (path, size, mtime, inode, ctime) of each file, to detect changes."""
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
