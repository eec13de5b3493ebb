"""The weights of a network: a published name, a path or a hub id → tensors and metadata,
opened once a run, checked.
"""

import logging
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from accel.errors import UsageError, path_errors, shown
from accel.files import weights_folder
from accel.weights import Contents
from accel.weights import metadata as schema
from accel.weights.tensor_files import file_stamps, mode_of

log = logging.getLogger(__name__)

FOLDER = weights_folder()
# published names; the variable's name is upstream's
pretrained_models = {"DiT-XL-2-512x512.pt", "DiT-XL-2-256x256.pt"}

HUB_ID = re.compile(r"[\w.-]+/[\w.-]*[^\W\d][\w.-]*")  # owner/name, unlike DiT-XL/2
FILE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
# Modules with holds(path) and read(path, mapped, entry) → Contents. The first that holds a path
# reads it; later ones are not imported.
LAYOUTS = "safetensors_layout", "training_layout", "diffusers_layout", "consolidated_layout"


class Checkpoint:
    """The weights that --ckpt names, fetched and opened when they are first needed.

    name: a published name, a .pt or .safetensors file, a folder in diffusers' layout or
    with consolidated weights, or a hub id (owner/name). mapped: tensors are mapped where
    the format allows it, else copies. entry: of a training file, the entry with the
    weights; default: the moving average's, else the first that is known. Raises UsageError
    if it names nothing, before anything is fetched.
    """

    def __init__(self, name: str | Path, mapped: bool = True, entry: str | None = None):
        self.name = str(name)
        self.mapped = mapped
        self.entry = entry
        self._path = _locate(self.name)  # None: on the hub
        self._stamps = None  # of the files that were opened first
        self._digest = None

    @property
    def path(self) -> Path:
        """Return the path of the weights; of published weights the path after fetching.
        Fetch a hub id for this.
        """
        if self._path is None:
            remedy = f"fetch https://huggingface.co/{self.name} by other means and give its folder"
            from accel.weights import diffusers_layout, fetch  # local weights need neither

            self._path = fetch.from_hub(self.name, "transformer/", "ckpt", remedy)
            if diffusers_layout.has_vae(self._path):
                fetch.from_hub(self.name, "vae/", "vae", "give another decoder by `vae`")
        return self._path

    @property
    def is_here(self) -> bool:
        """Return whether the weights are on this machine, so that `fetch` downloads nothing."""
        return self._path is not None and self._path.exists()

    def fetch(self) -> Path:
        """Download the weights if they are not here yet. Returns where they are. Raises
        UsageError.
        """
        if self.path.parent == FOLDER and not self.path.exists():
            from accel.weights import fetch

            fetch.download(self.path)
        return self.path

    @cached_property
    def _opened(self) -> Contents:
        stamps = self._stamp()  # before opening: the content read is of this version or a newer one
        self._stamps = self._stamps or stamps
        with path_errors("ckpt", self.path):
            layouts = (import_module(f"accel.weights.{name}") for name in LAYOUTS)
            layout = next((layout for layout in layouts if layout.holds(self.path)), None)
            if layout is None:
                raise UsageError(_no_layout(self.path))
            contents = layout.read(self.path, self.mapped, self.entry)
            return contents._replace(facts=schema.checked(self.path, contents.facts))

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Return the float tensors under their family's names, on the CPU. Read-only.

        Raises UsageError if the file is damaged, holds no weights, or would execute code
        on load.
        """
        return self._opened.state

    @property
    def metadata(self) -> dict[str, Any]:
        """Return the checked facts beside the tensors: a training run's arguments, a
        pipeline's configuration, or the converter's entries.
        """
        return self._opened.facts

    @contextmanager
    def reading(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the tensors. Afterwards drop them, so that the mapped files are closed. Raises
        UsageError if a file was changed since it was opened.
        """
        yield self.state
        self.__dict__.pop("_opened", None)
        self._require_unchanged()

    def _require_unchanged(self):
        if self._stamps not in (None, self._stamp()):
            raise UsageError(
                f"`ckpt={self.name}`: was changed while it was read; start again when it is whole"
            )

    def digest(self) -> str:
        """Return 16 hex digits of all values that were trained. A position table counts
        unless it is the sine-cosine table, which is a function of the grid.

        The first call for a file reads all of it; the cache folder keeps the result for
        later runs.
        """
        if self._digest is None:
            if "_opened" not in self.__dict__:
                self._require_unchanged()
            from accel.weights.digests import cached_digest  # a grid needs none
            from accel.weights.positions import trained

            stamps = self._stamps or self._stamp()
            self._digest = cached_digest(stamps, lambda: trained(self.state), self.entry or "")
        return self._digest

    def _stamp(self):
        """Return the stamps of every file that the weights may come from."""
        path = self.fetch()
        with path_errors("ckpt", path):
            inside = path.rglob("*") if path.is_dir() else [path]
            files = sorted(file for file in inside if file.is_file())
        return file_stamps(files, "ckpt")


def open_checkpoint(name: str | Path, entry: str | None = None) -> Checkpoint:
    """Return the weights that a name stands for, fetched and opened. entry, and errors: those
    of Checkpoint.
    """
    weights = Checkpoint(name, entry=entry)
    _ = weights.state
    return weights


def _no_layout(folder: Path) -> str:
    """Return the error for a folder in no layout. Files of weights in it are named."""
    names = [file.name for file in sorted(folder.iterdir()) if file.suffix in FILE_SUFFIXES]
    if names:
        return (
            f"`ckpt={folder}`: is a folder with files of weights, {shown(', '.join(names), 200)}; "
            f"give one of them, such as `ckpt={folder / names[-1]}`"
        )
    return (
        f"`ckpt={folder}`: a folder must hold transformer/config.json and its weights (diffusers' "
        "layout), or consolidated.00-of-01.pth"
    )


def _locate(name: str) -> Path | None:
    """Return the path that a name stands for, of published weights also where they will
    be; None for a hub id.
    """
    path = Path(name)
    mode = mode_of(path, "ckpt")
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return path
    if mode:
        raise UsageError(f"`ckpt={name}`: is a pipe, a socket or a device; give a file or a folder")
    published = FOLDER / path.name
    if path.name in pretrained_models and path in (
        Path(path.name),
        Path("pretrained_models", path.name),
        published,
    ):
        return published
    if HUB_ID.fullmatch(name) and path.suffix not in FILE_SUFFIXES and not path.parent.exists():
        return None
    if path.parent == FOLDER / "demo":
        raise UsageError(
            f"`ckpt={name}`: ships with the repository, not with the package; copy its "
            f"pretrained_models/demo to {path.parent}, or give other weights"
        )
    names = ", ".join(sorted(pretrained_models))
    raise UsageError(
        f"`ckpt={name}`: no such file; published names are {names}, a hub id is owner/name"
    )
