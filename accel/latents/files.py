"""The files of a decoder: a folder in diffusers' layout or a file in LDM's, given or
fetched, opened once, checked.
"""

import hashlib
import json
import stat
from functools import lru_cache
from pathlib import Path

import torch

from accel.errors import UsageError
from accel.latents import PIXELS, DecoderFiles, LatentSpace
from accel.latents.autoencoder_kl import KLDecoder, space_of
from accel.weights.checkpoint import FILE_SUFFIXES, FOLDER, HUB_ID
from accel.weights.shapes import shapes_only
from accel.weights.tensor_files import (
    WEIGHTS,
    file_stamps,
    mode_of,
    read_json,
    read_tensors,
    require_floats,
    weight_files,
)

PUBLISHED = ("ema", "mse")
FILES = ("config.json", WEIGHTS)


def find(name: str, statistics: str | None = None) -> LatentSpace:
    """Return the latent space of a VAE, with the folder or file of its decoder.

    name: a folder in diffusers' layout, a diffusers pipeline's root with vae/ in it, a
    .pt file in LDM's layout, a hub id, or ema or mse: pretrained_models/sd-vae-ft-NAME,
    else the hub's stabilityai/sd-vae-ft-NAME, which is fetched. statistics: a file with
    mean and deviation of the latents' channels; default, for LDM's layout: the file
    beside it. pixels: the space without decoder. Raises UsageError unless the files hold an
    AutoencoderKL's decoder.
    """
    if name == str(PIXELS.decoder):
        return PIXELS
    folder = FOLDER / f"sd-vae-ft-{name}" if name in PUBLISHED else Path(name)
    mode = mode_of(folder, "vae")
    is_tensors = folder.suffix in FILE_SUFFIXES
    if not stat.S_ISDIR(mode) and not (stat.S_ISREG(mode) and is_tensors):
        both = " and ".join(FILES)
        if name in PUBLISHED:
            repository = f"stabilityai/sd-vae-ft-{name}"
            remedy = f"put {both} of {repository} into {folder}"
        elif HUB_ID.fullmatch(name) and not mode and not is_tensors and not folder.parent.exists():
            repository = name
            remedy = (
                f"fetch https://huggingface.co/{name} by other means and give its folder, or its "
                ".pt file"
            )
        else:
            raise UsageError(
                f"`vae={name}`: neither ema nor mse nor a folder; give a folder with {both}"
            )
        from accel.weights import fetch

        folder = fetch.from_hub(repository, "", "vae", remedy)
    if not mode_of(folder / FILES[0], "vae") and stat.S_ISDIR(mode_of(folder / "vae", "vae")):
        folder = folder / "vae"
    files = DecoderFiles(folder, _stamps(folder))
    space = space_of(_open(files)[0], files)
    if not statistics and not folder.is_file():
        return space
    from accel.latents import ldm_layout  # a folder in diffusers' layout says all itself

    if statistics:
        return ldm_layout.with_statistics(space, statistics)
    return ldm_layout.scaled(space, folder)


def load(space: LatentSpace, device: torch.device | str) -> KLDecoder:
    """Return the float32 decoder of a space from `find`, on `device`. Raises UsageError as
    find does, and for files that were changed since.
    """
    entries, state = _open(space.decoder)
    with shapes_only():
        decoder = KLDecoder(entries)
    # strides decide rounding
    as_computed = dict(dtype=torch.float32, copy=True, memory_format=torch.contiguous_format)
    state = {name: tensor.to(device, **as_computed) for name, tensor in state.items()}
    require_unchanged(space.decoder)  # the state is mapped
    decoder.load_state_dict(state, assign=True)
    return decoder.eval().requires_grad_(False)


def digest(space: LatentSpace) -> str:
    """Return 16 hex digits of all that turns latents of a space into pixels: the space's
    numbers, the entries of config.json that the decoder takes, and its weights, whose own
    digest the cache folder keeps for later runs.
    """
    if space == PIXELS:
        return str(space.decoder)
    from accel.weights.digests import cached_digest  # a grid needs none

    entries, state = _open(space.decoder)
    of_weights = cached_digest(space.decoder.stamps, lambda: state)
    numbers = space._replace(decoder=None)._asdict()
    of_all = json.dumps({**entries, **numbers}, sort_keys=True)
    return hashlib.sha256(f"{of_weights} {of_all}".encode()).hexdigest()[:16]


def require_unchanged(decoder: DecoderFiles) -> None:
    """Raise UsageError if a file is not the one any more that was opened."""
    if _stamps(decoder.path) != decoder.stamps:
        raise UsageError(
            f"`vae={decoder.path}`: was changed since it was opened; start again when it is whole"
        )


def _files(path: Path) -> tuple[Path, ...]:
    if path.is_file():
        return (path,)
    return path / FILES[0], *weight_files(path, "vae")


def _stamps(path: Path) -> tuple[tuple, ...]:
    return tuple(file_stamps(_files(path), "vae"))


def _open(decoder: DecoderFiles) -> tuple[dict, dict[str, torch.Tensor]]:
    """Return (the entries of config.json that the decoder takes, its weights,
    memory-mapped). Read the files once. Raises UsageError if they were changed since.
    """
    require_unchanged(decoder)
    return _read(_files(decoder.path), decoder.stamps)


@lru_cache(maxsize=1)
def _read(files: tuple[Path, ...], stamps: tuple) -> tuple[dict, dict[str, torch.Tensor]]:
    if len(files) == 1:
        from accel.latents import ldm_layout

        config, state = ldm_layout.read(files[0])
    else:
        config = read_json(files[0], "vae")
        state = {}
    if config.get("_class_name") != "AutoencoderKL":
        raise UsageError(
            f"`vae={files[0]}`: describes {config.get('_class_name')}, not AutoencoderKL"
        )
    try:
        with shapes_only():
            decoder = KLDecoder(config)
    except ValueError as error:
        raise UsageError(
            f"`vae={files[0]}`: {error}, which is not computed here; give another AutoencoderKL"
        ) from None
    for file in files[1:]:
        state |= read_tensors(file, "vae")
    require_floats(state, f"`vae={files[-1]}`")
    state = decoder.renamed(state)
    want = decoder.state_dict()
    wrong = [name for name in want if name not in state or state[name].shape != want[name].shape]
    if wrong:
        raise UsageError(
            f"`vae={files[-1]}`: these weights are not those of "
            f"{'config.json' if files[1:] else 'an AutoencoderKL'} ({len(wrong)} entries differ, "
            f"first {wrong[0]}); copy them again"
        )
    return decoder.entries, state
