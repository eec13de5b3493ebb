"""The weights of a network: a published name, a path or a hub id → tensors, opened once a run, checked, identified."""

import os
import re
import stat
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from http.client import HTTPException
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from accel.errors import UsageError, path_errors
from accel.files import atomic_write
from accel.network import MODELS, constructor, unwrapped
from accel.weights import consolidated_layout, diffusers_layout
from accel.weights.tensor_files import cached_digest, file_stamps, mode_of, read_tensors, require_floats
from models import DiT

FOLDER = Path(__file__).resolve().parents[2] / "pretrained_models"
BASE_URL = "https://dl.fbaipublicfiles.com/DiT/models/"
pretrained_models = {"DiT-XL-2-512x512.pt", "DiT-XL-2-256x256.pt"}  # published names; the variable's name is upstream's

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FILE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
ENTRIES = ("ema", "model", "state_dict")  # of a training checkpoint; the first that is there is used
PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and of torch.compile
LABELS = "y_embedder.embedding_table.weight"


class Checkpoint:
    """The weights that --ckpt names, fetched and opened when they are first needed, and only once.

    name: a published name, a .pt or .safetensors file, a folder in diffusers' layout or as Large-DiT's training leaves
    it, or a hub id (owner/name). Raises UsageError if it names nothing, before anything is fetched.
    """

    build = None  # a model of these weights' shape is made by its name

    def __init__(self, name: str | Path):
        self.name = str(name)
        self._path = _locate(self.name)  # None: on the hub
        self._stamps = None  # of the files that `state` was read from
        self._digest = None

    @property
    def path(self) -> Path:
        """Where the weights are, or where published weights will be. A hub id is fetched for this."""
        if self._path is None:
            remedy = f"fetch https://huggingface.co/{self.name} by other means and give its folder"
            self._path = fetch_from_hub(self.name, "transformer/", "--ckpt", remedy)
        return self._path

    def fetch(self) -> Path:
        """Download the weights if they are not here yet. Returns where they are. Raises UsageError."""
        if self.path.parent == FOLDER and not self.path.exists():
            _download(self.path)
        return self.path

    @cached_property
    def state(self) -> dict[str, torch.Tensor]:
        """Float tensors under the names of models.DiT or large_dit.DiT_Llama, on the CPU, memory-mapped where the
        format allows it. Read-only.

        Raises UsageError if the file is damaged, holds no weights, or would execute code on load.
        """
        self._stamps = self._stamp()  # before opening: what was read is of this version, or of a newer one
        with path_errors("--ckpt", self.path):
            return _open_folder(self.path) if self.path.is_dir() else _open_file(self.path)

    @property
    def trained_with(self) -> dict[str, Any]:
        """The arguments of the training run, if the folder has them."""
        return consolidated_layout.arguments_of(self.path) if self.path.is_dir() else {}

    def digest(self) -> str:
        """16 hex digits of all values but the position table's, which are a function of the grid.

        The first call for a file reads all of it; the cache folder keeps the result for later runs.
        """
        if self._digest is None:
            self._digest = cached_digest(self._stamps or self._stamp(), self._trained)
        return self._digest

    def _trained(self):
        return {name: tensor for name, tensor in self.state.items() if name != "pos_embed"}

    def _stamp(self):
        """The version of every file that the weights may come from."""
        path = self.fetch()
        with path_errors("--ckpt", path):
            files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        return file_stamps(files, "--ckpt")

    def require_fit(self, model_name: str, model: torch.nn.Module, image_size: int) -> None:
        """Raise UsageError, with the remedy, unless these are weights of `model`, trained at whatever image size.

        model: the module of `model_name` for pictures of `image_size` pixels, on the meta device.
        """
        have, want, wrong = _compare(self.state, model)
        if not wrong:
            return
        classes = have[LABELS][0] - 1 if LABELS in have else 1000
        if wrong == [LABELS] and LABELS in have and have[LABELS][1:] == want[LABELS][1:]:
            raise UsageError(
                f"--num-classes {want[LABELS][0] - 1}: the weights in {self.name} know {classes} classes; "
                f"use --num-classes {classes}"
            )
        for other in MODELS:
            with shapes_only():
                candidate = constructor(other, have)(input_size=image_size // 8, num_classes=classes)
            if _shapes(candidate.state_dict()) == have:
                raise UsageError(
                    f"--ckpt {self.name}: holds the weights of {other}, not of {model_name}; use --model {other}"
                )
        first = wrong[0]
        raise UsageError(
            f"--ckpt {self.name}: fits none of {', '.join(MODELS)} ({len(wrong)} entries differ, first {first}: "
            f"{have.get(first, 'missing')}, {model_name} has {want.get(first, 'none')})"
        )


class Held:
    """A copy of the weights of a DiT that the caller holds, in a Checkpoint's place.

    module: models.DiT or a class with the same state dict and `num_heads`; wrapped or compiled ones are unwrapped.
    `build` makes a model of its shape, as an entry of network.MODELS does. Raises UsageError for another module.
    """

    trained_with = {}  # nothing is known of the training run

    def __init__(self, module: torch.nn.Module):
        module = unwrapped(module)
        self.name = type(module).__name__
        self.state = {name: value.detach().clone() for name, value in module.state_dict().items()}
        try:
            width, channels, patch, _ = self.state["x_embedder.proj.weight"].shape
            fc1, last = self.state["blocks.0.mlp.fc1.weight"], self.state["final_layer.linear.weight"]
            self.image_size = 8 * patch * isqrt(self.state["pos_embed"].shape[1])
            self.num_classes = len(self.state[LABELS]) - 1  # the last is the null class
            shape = dict(hidden_size=width, patch_size=patch, in_channels=channels, num_heads=module.num_heads)
        except (KeyError, AttributeError) as error:
            raise UsageError(f"{self.name}: is not a DiT, it has no {getattr(error, 'name', error)}") from None
        if channels != 4 or len(last) != 2 * channels * patch**2:
            raise UsageError(f"{self.name}: must have 4 latent channels and learned sigma; use accel.accelerate")
        depth = sum(name.endswith(".attn.qkv.weight") for name in self.state)
        self.build = partial(DiT, **shape, depth=depth, mlp_ratio=(len(fc1) + 0.5) / width)

    def require_fit(self, model_name: str, model: torch.nn.Module, image_size: int) -> None:
        """Raise UsageError unless these are all weights of `model`, on the meta device."""
        wrong = _compare(self.state, model)[2]
        if wrong:
            raise UsageError(f"{self.name}: is not a DiT, {len(wrong)} entries differ (first {wrong[0]})")


def published_name(model: str, image_size: int, num_classes: int) -> str:
    """The published weights of a model for an image size in pixels. Raises UsageError if there are none."""
    name = f"DiT-XL-2-{image_size}x{image_size}.pt"
    if model != "DiT-XL/2" or name not in pretrained_models or num_classes != 1000:
        raise UsageError(
            f"--ckpt: no published weights for {model} at {image_size} px with {num_classes} classes "
            f"(there are DiT-XL/2 at 256 and 512); give a file or a folder"
        )
    return name


def find_model(name_or_path: str | Path) -> dict[str, torch.Tensor]:
    """State dict of a DiT, as upstream's function of this name gives it. Names are those that Checkpoint takes."""
    return Checkpoint(name_or_path).state


def download_model(name: str) -> dict[str, torch.Tensor]:
    """State dict of published weights, as upstream's function of this name gives it. They are downloaded once."""
    if name not in pretrained_models:
        raise UsageError(f"--ckpt {name}: not published; the names are {', '.join(sorted(pretrained_models))}")
    return find_model(name)


def fetch_published() -> None:
    """Download all published weights that are not here and print where they are: what `python download.py` does."""
    for name in sorted(pretrained_models):
        try:
            print(Checkpoint(FOLDER / name).fetch())
        except UsageError as error:
            sys.exit(f"download.py: {error}")


class _NoInitialisation(TorchFunctionMode):
    """On the meta device there is nothing to draw, but trying makes torch import its compiler: up to three seconds."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        draws = function in (torch.Tensor.uniform_, torch.Tensor.normal_)
        if draws or getattr(function, "__module__", None) == "torch.nn.init":
            return arguments[0] if arguments else keywords["tensor"]
        return function(*arguments, **keywords or {})


@contextmanager
def shapes_only() -> Iterator[None]:
    """Modules made inside have shapes and no values: parameters on the meta device, nothing is initialised."""
    with torch.device("meta"), _NoInitialisation():
        yield


#################################################################################
#                               Finding and fetching                            #
#################################################################################


def _locate(name: str) -> Path | None:
    """The path that a name stands for, of published weights also where they will be; None for a hub id."""
    path = Path(name)
    mode = mode_of(path, "--ckpt")
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return path
    if mode:
        raise UsageError(f"--ckpt {name}: is a pipe, a socket or a device; give a file or a folder")
    published = FOLDER / path.name
    if path.name in pretrained_models and path in (Path(path.name), Path("pretrained_models", path.name), published):
        return published
    if HUB_ID.fullmatch(name) and path.suffix not in FILE_SUFFIXES and not path.parent.exists():
        return None
    names = ", ".join(sorted(pretrained_models))
    raise UsageError(f"--ckpt {name}: no such file; published names are {names}, a hub id is owner/name")


def _download(target: Path) -> None:
    """Fetch published weights to `target`, with a progress bar. The file is whole or absent."""
    from tqdm import tqdm

    url = BASE_URL + target.name
    try:
        with urllib.request.urlopen(url, timeout=30) as response, atomic_write(target, durable=True) as file:
            total = int(response.headers.get("Content-Length", 0)) or None
            with tqdm(total=total, unit="B", unit_scale=True, desc=target.name) as bar:
                while block := response.read(1 << 20):
                    file.write(block)
                    bar.update(len(block))
            if total is not None and file.tell() != total:
                raise OSError(f"the connection ended after {file.tell()} of {total} bytes")
    except (OSError, HTTPException) as error:  # URLError, time-outs and a full disk are OSErrors
        raise UsageError(
            f"--ckpt {target.name}: download failed ({error}); fetch {url} by other means and put it at {target}"
        ) from None


def fetch_from_hub(repository: str, subfolder: str, flag: str, remedy: str) -> Path:
    """The local copy of a hub repository: config and weights of `subfolder` ("" or a name with a slash) only.

    What is in the hub's cache is not asked for again. Raises UsageError about `flag`.
    """
    from huggingface_hub import snapshot_download

    def snapshot(suffix, **how):
        names = "config.json", f"diffusion_pytorch_model{suffix}*", f"diffusion_pytorch_model-*{suffix}"
        root = Path(snapshot_download(repository, allow_patterns=[subfolder + name for name in names], **how))
        diffusers_layout.weight_files(root / subfolder, flag)
        return root

    with suppress(Exception):  # not cached, or not whole
        return snapshot(".safetensors", local_files_only=True)
    try:
        with suppress(UsageError):  # the repository has pickles only
            return snapshot(".safetensors")
        return snapshot(".bin")
    except Exception as error:  # a network fails in many ways; the remedy is the same
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        raise UsageError(
            f"{flag} {repository}: not here, and fetching it from the hub failed ({reason}); {remedy}"
        ) from None


#################################################################################
#                                    Opening                                    #
#################################################################################


def _open_file(path: Path) -> dict[str, torch.Tensor]:
    state = read_tensors(path, "--ckpt")
    state = next((state[entry] for entry in ENTRIES if isinstance(state.get(entry), dict)), state)
    if not state or not all(isinstance(value, torch.Tensor) for value in state.values()):
        entries = ", ".join(map(str, list(state)[:5]))
        raise UsageError(f"--ckpt {path}: holds no state dict of tensors (entries: {entries})")
    require_floats(state, "--ckpt", path)
    prefix = ""
    while found := [one for one in PREFIXES if all(name.startswith(prefix + one) for name in state)]:
        prefix += found[0]
    if prefix:
        print(f'--ckpt {path}: every name begins with "{prefix}", as a wrapped model is saved; loading without it')
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def _open_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Another layout is another case here, and a module like diffusers_layout."""
    names = os.listdir(folder)
    if "transformer" in names or "config.json" in names:
        return diffusers_layout.read_folder(folder / "transformer" if "transformer" in names else folder)
    if any(name.startswith("consolidated") for name in names) or consolidated_layout.ARGUMENTS in names:
        state = _open_file(consolidated_layout.weights_of(folder))
        consolidated_layout.require_match(folder, state)
        return state
    raise UsageError(
        f"--ckpt {folder}: a folder must hold transformer/config.json and its weights (diffusers' layout), or "
        "consolidated.00-of-01.pth (Large-DiT's)"
    )


def _compare(state, model):
    """The shapes that the weights `state` have, those that `model` wants, and the names that differ."""
    have, want = _shapes(state), _shapes(model.state_dict())
    return have, want, [name for name in {**want, **have} if want.get(name) != have.get(name)]


def _shapes(state: dict[str, torch.Tensor]) -> dict[str, tuple]:
    """Shape of every entry; position tables of all square grids have the same."""
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    table = shapes.get("pos_embed", ())
    if len(table) == 3 and table[0] == 1 and table[1] == isqrt(table[1]) ** 2 > 0:
        shapes["pos_embed"] = (1, "side*side", table[2])
    return shapes
