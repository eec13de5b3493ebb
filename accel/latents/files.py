"""The files of a decoder: a folder in diffusers' layout, given or fetched, opened once and checked."""

import stat
from functools import lru_cache
from pathlib import Path

import torch

from accel.errors import UsageError
from accel.latents import LatentSpace
from accel.latents.autoencoder_kl import KLDecoder, check_config, space_of
from accel.weights.checkpoint import FOLDER, fetch_from_hub
from accel.weights.diffusers_layout import WEIGHTS, weight_files
from accel.weights.shapes import shapes_only
from accel.weights.tensor_files import (
    cached_digest,
    digest_with,
    file_stamps,
    mode_of,
    read_json,
    read_tensors,
    require_floats,
)

PUBLISHED = ("ema", "mse")
FILES = ("config.json", WEIGHTS)


def find(name: str) -> LatentSpace:
    """The latent space of a VAE in diffusers' layout, with the folder of its decoder.

    name: a folder, a diffusers pipeline's root with vae/ in it, or ema or mse: pretrained_models/sd-vae-ft-NAME, else
    the hub's stabilityai/sd-vae-ft-NAME, which is fetched. Raises UsageError unless it holds a decoder of that kind.
    """
    folder = FOLDER / f"sd-vae-ft-{name}" if name in PUBLISHED else Path(name)
    if not stat.S_ISDIR(mode_of(folder, "vae")):
        if name not in PUBLISHED:
            raise UsageError(
                f"`vae={name}`: neither ema nor mse nor a folder; give a folder with {' and '.join(FILES)}"
            )
        remedy = f"put {' and '.join(FILES)} of stabilityai/sd-vae-ft-{name} into {folder}"
        folder = fetch_from_hub(f"stabilityai/sd-vae-ft-{name}", "", "vae", remedy)
    if not mode_of(folder / FILES[0], "vae") and stat.S_ISDIR(mode_of(folder / "vae", "vae")):
        folder = folder / "vae"
    return space_of(_open(folder)[0], folder)


def load(space: LatentSpace, device: torch.device | str) -> KLDecoder:
    """The float32 decoder of a space that `find` gave, on `device`. Raises UsageError as find does."""
    entries, state = _open(space.decoder)
    with shapes_only():
        decoder = KLDecoder(entries)
    state = {name: tensor.to(device, torch.float32, copy=True) for name, tensor in state.items()}
    decoder.load_state_dict(state, assign=True)
    return decoder.eval().requires_grad_(False)


def digest(space: LatentSpace) -> str:
    """16 hex digits of all that turns latents of a space into pixels: the space's numbers, the entries of config.json
    that the decoder takes, and its weights, whose own digest the cache folder keeps for later runs."""
    folder, numbers = space.decoder, space._replace(decoder=None)._asdict()
    of_weights = cached_digest(file_stamps(_files(folder), "vae"), lambda: _open(folder)[1])
    return digest_with({**_open(folder)[0], **numbers}, of_weights)


def _files(folder: Path) -> list[Path]:
    return [folder / FILES[0], *weight_files(folder, "vae")]


def _open(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """The entries of config.json that the decoder takes and its weights, memory-mapped. They are opened once and kept
    until a file changes."""
    files = _files(folder)
    return _read(tuple(files), tuple(file_stamps(files, "vae")))


@lru_cache(maxsize=1)
def _read(files: tuple[Path, ...], stamps: tuple) -> tuple[dict, dict[str, torch.Tensor]]:
    config = read_json(files[0], "vae")
    if config.get("_class_name") != "AutoencoderKL":
        raise UsageError(f"`vae={files[0]}`: describes {config.get('_class_name')}, not AutoencoderKL")
    try:
        entries = check_config(config)
        with shapes_only():
            decoder = KLDecoder(entries)
    except ValueError as error:
        raise UsageError(f"`vae={files[0]}`: {error}, which is not computed here; give another AutoencoderKL") from None
    state = {}
    for file in files[1:]:
        state |= read_tensors(file, "vae")
    require_floats(state, "vae", files[1])
    state, want = decoder.renamed(state), decoder.state_dict()
    wrong = [name for name in want if name not in state or state[name].shape != want[name].shape]
    if wrong:
        raise UsageError(
            f"`vae={files[1]}`: these weights are not those of config.json ({len(wrong)} entries differ, "
            f"first {wrong[0]}); copy both again"
        )
    return entries, state
