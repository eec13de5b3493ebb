"""Find, recognise and load a decoder: files are fetched if needed, read once and checked for
changes.
"""

import hashlib
import json
import stat
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch

from accel import decoders as latents
from accel.decoders import DecoderFiles, DecoderKind, LatentSpace
from accel.errors import UsageError, shown
from accel.families import FOLDER
from accel.io.filesystem import place_for
from accel.tensors.shapes import shapes_only
from accel.tensors.tensor_files import (
    FILE_SUFFIXES,
    HUB_ID,
    WEIGHTS,
    file_stamps,
    mode_of,
    read_json,
    read_tensors,
)

PUBLISHED = ("ema", "mse")
FILES = ("config.json", WEIGHTS)


def kind_names() -> list[str]:
    """List the kinds of decoder: the folders of accel/decoders."""
    return sorted(module.name for module in iter_modules(latents.__path__) if module.ispkg)


def kind_of(name: str) -> DecoderKind:
    """Import a kind of decoder."""
    return import_module(f"{latents.__name__}.{name}").KIND


def recognise(name: str) -> tuple[Path, DecoderKind]:
    """Return the path of a decoder, fetched if needed, and its kind. name: as for `find`. Raises
    UsageError.
    """
    if name in kind_names() and kind_of(name).builtin_space:
        return Path(name), kind_of(name)
    path = _locate(name)
    content = _content(path)
    # In alphabetical order; kinds after the first that matches are not imported.
    kind = next((kind for kind in map(kind_of, kind_names()) if kind.matches(content)), None)
    if kind is None:
        described = content.get("_class_name") or content.get("model_type") or "something else"
        raise UsageError(
            f"contains no decoder of a known kind ({', '.join(kind_names())}), but "
            f"{shown(described)}",
            parameter="vae",
            value=path if path.is_file() else path / FILES[0],
        )
    return path, kind


def find(name: str, statistics: str | None = None) -> LatentSpace:
    """Find a decoder and return its latent space.

    name: a decoder's file or folder, the root of a diffusers pipeline with vae/, a hub id, "ema"
    or "mse" (pretrained_models/sd-vae-ft-NAME, else stabilityai/sd-vae-ft-NAME from the hub), or
    "pixels". statistics: a file with mean and std of the latents; default: the file next to the
    decoder if the decoder contains none. Raises UsageError.
    """
    path, kind = recognise(str(name))
    if kind.builtin_space:
        return kind.builtin_space
    stamps = tuple(file_stamps(kind.files(path, statistics), "vae"))
    files = DecoderFiles(path, stamps, kind, statistics)
    return kind.space(files, _read(files)[0])


def _locate(name):
    """Return the folder or file of a decoder. Fetch a published decoder or a hub id."""
    folder = FOLDER / f"sd-vae-ft-{name}" if name in PUBLISHED else Path(name)
    mode = mode_of(folder, "vae")
    is_tensors = folder.suffix in FILE_SUFFIXES
    if not stat.S_ISDIR(mode) and not (stat.S_ISREG(mode) and is_tensors):
        both = " and ".join(FILES)
        if name in PUBLISHED:
            repository = f"stabilityai/sd-vae-ft-{name}"
            remedy = f"put {both} of {repository} into {place_for(folder.name, FOLDER)}"
        elif HUB_ID.fullmatch(name) and not mode and not is_tensors and not folder.parent.exists():
            repository = name
            remedy = (
                f"fetch https://huggingface.co/{name} by other means and give its folder, or its "
                ".pt file"
            )
        else:
            raise UsageError(
                f"`vae={name}`: no such file; give a decoder's file or folder"
                if is_tensors and not mode
                else f"`vae={name}`: neither ema nor mse nor a folder; give a folder with {both}"
            )
        from accel.tensors import fetch

        folder = fetch.from_hub(repository, "", "vae", remedy)
    if not mode_of(folder / FILES[0], "vae") and stat.S_ISDIR(mode_of(folder / "vae", "vae")):
        return folder / "vae"
    return folder


def _content(path: Path) -> Mapping[str, Any]:
    """Read the file by which the kind is recognised."""
    file = path if path.is_file() else path / FILES[0]
    if not mode_of(file, "vae"):
        raise UsageError(f"must contain {' and '.join(FILES)}", parameter="vae", value=path)
    return read_json(file, "vae") if file.suffix == ".json" else read_tensors(file, "vae")


def load(space: LatentSpace, device: torch.device | str) -> torch.nn.Module:
    """Load the float32 decoder of a space onto `device`: the identity for a kind without files.
    Raises UsageError as `find` does, and if a file was changed since.
    """
    if space.files.kind.builtin_space is not None:
        return torch.nn.Identity()
    entries, state = _read(space.files)
    with shapes_only():
        decoder = space.files.kind.build(entries)
    # contiguous: strides affect rounding
    state = {
        name: tensor.to(device, torch.float32, copy=True, memory_format=torch.contiguous_format)
        for name, tensor in state.items()
    }
    _read.cache_clear()  # it keeps the mapped files open
    require_unchanged(space.files)
    decoder.load_state_dict(state, assign=True)
    return decoder.eval().requires_grad_(False)


def digest(space: LatentSpace) -> str:
    """Return 16 hex digits that identify the mapping from latents to pixels: the numbers of the
    space, the configuration and the weights, whose digest is cached. For a kind without files,
    return its name.
    """
    if space.files.kind.builtin_space is not None:
        return str(space.files.path)
    from accel.tensors.digests import cached_digest  # lazy: only for FID jobs

    entries, state = _read(space.files)
    require_unchanged(space.files)
    weights_digest = cached_digest(space.files.stamps, lambda: state)
    numbers = space._replace(decoder=None)._asdict()
    del numbers["side"]  # follows from the weights
    settings = json.dumps({**entries, **numbers}, sort_keys=True)
    return hashlib.sha256(f"{weights_digest} {settings}".encode()).hexdigest()[:16]


def require_unchanged(decoder: DecoderFiles) -> None:
    """Raise UsageError if a file was changed since the decoder was opened."""
    files = decoder.kind.files(decoder.path, decoder.statistics)
    if tuple(file_stamps(files, "vae")) != decoder.stamps:
        raise UsageError(
            "was changed since it was opened",
            "start again when the file is complete",
            parameter="vae",
            value=decoder.path,
        )


@lru_cache(maxsize=1)
def _read(decoder: DecoderFiles) -> tuple[dict, dict[str, torch.Tensor]]:
    """Return the configuration and the memory-mapped weights. The result is cached, so callers
    that use the weights must call `require_unchanged`.
    """
    return decoder.kind.read(decoder, _content(decoder.path))
