"""Find DiT weights: published ones by name, a .pt or .safetensors file, a folder in diffusers' layout.

``python pretrained_models/download.py`` fetches the published weights.
"""

import argparse
import json
import os
import pickle
import re
import sys
import urllib.request
import zipfile
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent
if not __package__ and __name__ == "__main__":
    sys.path[0] = str(FOLDER.parent)

from accel.options import UsageError, partial_file

BASE_URL = "https://dl.fbaipublicfiles.com/DiT/models/"
pretrained_models = {"DiT-XL-2-512x512.pt", "DiT-XL-2-256x256.pt"}


def find_model(name_or_path):
    """State dict of a DiT in this repository's keys, tensors on the CPU, memory-mapped where the file format allows it.

    `name_or_path`: a published name (fetched on first use), a .pt file (its `ema` entry if it has one, then `model`), a .safetensors
    file, or a folder in diffusers' layout (`transformer/config.json` and its safetensors).
    Raises UsageError, in one line, if it is missing, truncated, ambiguous, not a DiT, or would execute code on load.
    """
    path = check_there(name_or_path)
    if not path.exists():
        download_model(path.name)
    if path.is_dir():
        return _from_diffusers(path)
    state = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pt(path)
    if not state or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UsageError(
            f"--ckpt {path}: holds no state dict of tensors (entries: {', '.join(map(str, list(state)[:5]))})"
        )
    return state


def check_there(name_or_path):
    """The path that `name_or_path` stands for, as in `find_model`; of published weights also one where they are to be put. Raises UsageError if it names
    nothing."""
    path = Path(name_or_path)
    if (
        not path.exists()
        and path.name in pretrained_models
        and str(path) in (path.name, f"pretrained_models/{path.name}")
    ):
        return FOLDER / path.name
    if not path.exists():
        raise UsageError(
            f"--ckpt {name_or_path}: no such file; published names are {', '.join(sorted(pretrained_models))}"
        )
    return path


def download_model(model_name, url=None, folder=None):
    """Fetch published weights into `folder` (default: this file's), showing progress; returns the path. The file gets its name only when all its bytes are
    there, so that an interrupted download never looks whole."""
    from tqdm import tqdm

    target, url = Path(folder or FOLDER) / model_name, url or BASE_URL + model_name
    remedy = f"fetch {url} by other means and put it at {target}"
    try:
        with (
            partial_file(target) as partial,
            urllib.request.urlopen(url, timeout=30) as response,
            open(partial, "wb") as file,
        ):
            total = int(response.headers.get("Content-Length", 0)) or None
            with tqdm(total=total, unit="B", unit_scale=True, desc=model_name) as bar:
                while block := response.read(1 << 20):
                    file.write(block)
                    bar.update(len(block))
            file.flush()
            os.fsync(file.fileno())
            if total is not None and file.tell() != total:
                raise OSError(f"the connection ended after {file.tell()} of {total} bytes")
    except OSError as error:  # URLError, time-outs and a full disk are OSErrors
        raise UsageError(f"--ckpt {model_name}: download failed ({error}); {remedy}") from None
    return target


def _read_pt(path):
    try:
        if path.open("rb").read(2) == b"PK" and not zipfile.is_zipfile(path):
            raise EOFError  # a zip archive's directory stands at its end
        # Training scripts store their parsed arguments beside the weights: a Namespace is plain data.
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        if "truncated" in str(error) or "Ran out of input" in str(error):
            raise UsageError(f"--ckpt {path}: truncated or not a checkpoint; copy it again") from None
        what = re.search(r"GLOBAL (\S+)|class (\S+)", str(error))
        what = next(filter(None, what.groups())) if what else "objects that are no tensors"
        raise UsageError(
            f"--ckpt {path}: refused, loading it would run code ({what}); save its state dict with torch.save"
        ) from None
    except OSError as error:
        raise UsageError(f"--ckpt {path}: cannot be read ({error.strerror})") from None
    except Exception:  # an unpickler ends in whatever the bytes happen to mean
        raise UsageError(f"--ckpt {path}: truncated or not a checkpoint; copy it again") from None
    if not isinstance(state, dict):
        raise UsageError(f"--ckpt {path}: holds a {type(state).__name__}, not a state dict")
    for entry in ("ema", "model", "state_dict"):
        if isinstance(state.get(entry), dict):
            return state[entry]
    return state


def _read_safetensors(path):
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"--ckpt {path}: truncated or not safetensors ({error}); copy it again") from None


#################################################################################
#                               diffusers' layout                               #
#################################################################################

# Ours → diffusers' DiTTransformer2DModel. It keeps a copy of both embedders in every block and q, k, v apart.
_OUTER = {
    "x_embedder.proj": "pos_embed.proj",
    "final_layer.adaLN_modulation.1": "proj_out_1",
    "final_layer.linear": "proj_out_2",
}
_EMBEDDERS = {
    "t_embedder.mlp.0.weight": "emb.timestep_embedder.linear_1.weight",
    "t_embedder.mlp.0.bias": "emb.timestep_embedder.linear_1.bias",
    "t_embedder.mlp.2.weight": "emb.timestep_embedder.linear_2.weight",
    "t_embedder.mlp.2.bias": "emb.timestep_embedder.linear_2.bias",
    "y_embedder.embedding_table.weight": "emb.class_embedder.embedding_table.weight",
}
_BLOCK = {
    "attn.proj": "attn1.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    "adaLN_modulation.1": "norm1.linear",
}
_KINDS = ("weight", "bias")


def to_diffusers(state):
    """This repository's state dict → the one of diffusers' DiTTransformer2DModel (the position table, which it computes, is dropped)."""
    depth = 1 + max(int(key.split(".")[1]) for key in state if key.startswith("blocks."))
    out = {f"{theirs}.{kind}": state[f"{ours}.{kind}"] for ours, theirs in _OUTER.items() for kind in _KINDS}
    for n in range(depth):
        ours, theirs = f"blocks.{n}", f"transformer_blocks.{n}"
        out.update({f"{theirs}.norm1.{key}": state[name] for name, key in _EMBEDDERS.items()})
        out.update({f"{theirs}.{b}.{kind}": state[f"{ours}.{a}.{kind}"] for a, b in _BLOCK.items() for kind in _KINDS})
        for kind in _KINDS:
            for name, part in zip("qkv", state[f"{ours}.attn.qkv.{kind}"].chunk(3)):
                out[f"{theirs}.attn1.to_{name}.{kind}"] = part
    return out


def from_diffusers(state, sample_size, patch_size):
    """The inverse of `to_diffusers`; the position table is computed for a grid of sample_size / patch_size.

    Raises UsageError if a key is missing or the blocks' copies of the embedders differ.
    """
    from models import get_2d_sincos_pos_embed

    try:
        depth = 1 + max(int(key.split(".")[1]) for key in state if key.startswith("transformer_blocks."))
        out = {f"{ours}.{kind}": state[f"{theirs}.{kind}"] for ours, theirs in _OUTER.items() for kind in _KINDS}
        for name, key in _EMBEDDERS.items():
            copies = [state[f"transformer_blocks.{n}.norm1.{key}"] for n in range(depth)]
            if not all(torch.equal(copies[0], copy) for copy in copies[1:]):
                raise UsageError(f"--ckpt: the blocks' copies of {key} differ; such a model is no DiT")
            out[name] = copies[0]
        for n in range(depth):
            ours, theirs = f"blocks.{n}", f"transformer_blocks.{n}"
            out.update(
                {f"{ours}.{a}.{kind}": state[f"{theirs}.{b}.{kind}"] for a, b in _BLOCK.items() for kind in _KINDS}
            )
            for kind in _KINDS:
                out[f"{ours}.attn.qkv.{kind}"] = torch.cat(
                    [state[f"{theirs}.attn1.to_{name}.{kind}"] for name in "qkv"]
                )
    except (KeyError, ValueError) as error:
        raise UsageError(f"--ckpt: not a DiT in diffusers' layout (missing {error})") from None
    width = out["x_embedder.proj.weight"].shape[0]
    table = get_2d_sincos_pos_embed(width, sample_size // patch_size)
    out["pos_embed"] = torch.from_numpy(table).to(out["x_embedder.proj.weight"].dtype).unsqueeze(0)
    return out


def _from_diffusers(folder):
    root = folder / "transformer" if (folder / "transformer").is_dir() else folder
    files = sorted(root.glob("*.safetensors"))
    index = root / "diffusion_pytorch_model.safetensors.index.json"
    plain = root / "diffusion_pytorch_model.safetensors"
    if not files or not (root / "config.json").is_file():
        raise UsageError(
            f"--ckpt {folder}: a folder must hold transformer/config.json and its .safetensors (diffusers' layout)"
        )
    try:
        config = json.loads((root / "config.json").read_text())
        if index.is_file():
            files = sorted({root / name for name in json.loads(index.read_text())["weight_map"].values()})
        elif plain in files:
            files = [plain]
        elif len(files) > 1:
            raise UsageError(
                f"--ckpt {folder}: {', '.join(file.name for file in files)} conflict; give one of them as --ckpt"
            )
        sizes = config["sample_size"], config["patch_size"]
    except (ValueError, KeyError) as error:
        raise UsageError(f"--ckpt {folder}: its JSON is damaged or lacks an entry ({error}); copy it again") from None
    state = {}
    for file in files:
        state.update(_read_safetensors(file))
    return from_diffusers(state, *sizes)


if __name__ == "__main__":
    for name in sorted(pretrained_models):
        try:
            print(download_model(name) if not (FOLDER / name).exists() else FOLDER / name)
        except UsageError as error:
            sys.exit(f"download.py: {error}")
