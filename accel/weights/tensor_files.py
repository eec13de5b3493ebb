"""Files of tensors and JSON that a user names: read safely, and every failure is one line
about the parameter.

Nothing in a file is ever executed, a pipe or a device is never opened, and tensors are
memory-mapped where the format allows it.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from accel.errors import UsageError, path_errors, shown
from accel.files import is_utf8, open_regular
from accel.files import read_json as read_object
from accel.weights import Contents

# The weights of a folder in diffusers' layout, beside its config.json.
WEIGHTS = "diffusion_pytorch_model.safetensors"
PICKLED = "diffusion_pytorch_model.bin"


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
        return read_safetensors(path, parameter, mapped).state
    from accel.weights.pickles import read_pickle

    return read_pickle(path, parameter, dict, "a state dict", mapped)


def read_safetensors(path: Path, parameter: str, mapped: bool = True) -> Contents:
    """Return the content of a .safetensors file, its facts as the header has them; mapped:
    as for `read_tensors`. Raises UsageError about `parameter`.
    """
    from safetensors import SafetensorError, safe_open

    if not is_utf8(path):
        raise UsageError(
            f"`{parameter}={path}`: has a name that is not UTF-8, which safetensors does not open; "
            "rename it"
        )
    with path_errors(parameter, path):
        open_regular(path).close()  # safetensors has errors of its own for pipes and permissions
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                header = dict(file.metadata() or {})
            if not mapped:
                tensors = {name: value.clone() for name, value in tensors.items()}
            return Contents(tensors, header)
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0][:120]
            raise UsageError(
                f"`{parameter}={path}`: truncated or not safetensors ({reason}); copy it again"
            ) from None


def weight_files(folder: Path, parameter: str) -> list[Path]:
    """Return the weights beside a config.json: one file, or shards; .safetensors rather
    than .bin. Raises UsageError.
    """
    with path_errors(parameter, folder):
        names = os.listdir(folder)
    for plain in (WEIGHTS, PICKLED):
        index = f"{plain}.index.json"
        indices = [name for name in names if name.startswith(f"{plain}.index.")]
        if plain not in names and len(indices) == 1:
            index = indices[0]  # also a variant's, such as fp16's
        if index in names:
            shards = read_json(folder / index, parameter).get("weight_map")
            listed = {str(name) for name in shards.values()} if isinstance(shards, dict) else set()
            missing = ", ".join(sorted(listed - set(names)))  # a name with a slash is never there
            if missing or not listed:
                raise UsageError(
                    f"`{parameter}={folder}`: lacks {missing or 'the files'} that {index} names; "
                    "copy it again"
                )
            return [folder / name for name in sorted(listed)]
        if plain in names and "config.json" in names:
            return [folder / plain]
    others = sorted(name for name in names if name.endswith(".safetensors"))
    if len(others) > 1:
        raise UsageError(f"`{parameter}={folder}`: {', '.join(others)} conflict; keep one of them")
    if not others or "config.json" not in names:
        raise UsageError(f"`{parameter}={folder}`: must hold config.json and {WEIGHTS}")
    return [folder / others[0]]


def read_json(path: Path, parameter: str) -> dict:
    """Return the object in a JSON file. Raises UsageError about `parameter`."""
    with path_errors(parameter, path):
        try:
            return read_object(path)
        except ValueError:
            raise UsageError(f"`{parameter}={path}`: is not a JSON object; copy it again") from None


def require_floats(state: dict, source: str) -> None:
    """Raise UsageError about `source` unless every entry of a state dict is a dense
    tensor of floats, not empty, with at least one dimension.
    """
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or tensor.is_nested:
            description = f"of type {type(tensor).__name__}"  # nested tensors have no shape
        elif (
            tensor.layout is torch.strided
            and not tensor.is_meta
            and tensor.ndim
            and tensor.numel()
            and tensor.is_floating_point()
            and isinstance(name, str)
        ):
            continue
        else:
            place = f"{tensor.layout} on {tensor.device}"
            description = f"{tensor.dtype} of shape {tuple(tensor.shape)}, {place}"
        raise UsageError(
            f"{source}: {shown(name)} is {description}; weights are dense tensors of floats, save "
            "them as such"
        )


def require_finite_floats(state: dict[str, torch.Tensor], source: str) -> None:
    """Raise UsageError about `source` for a tensor with an infinity or NaN. It reads them all."""
    for name, tensor in state.items():
        if not tensor.float().isfinite().all():  # float8 has no isfinite
            raise UsageError(
                f"{source}: {shown(name)} has values that are not finite; check the weights"
            )


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
