"""The weights of a network: a published name, a path or a hub id → tensors and metadata,
opened once a run, checked.
"""

import re
import stat
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch

from accel.errors import UsageError, path_errors
from accel.files import atomic_write
from accel.weights import consolidated_layout, diffusers_layout, positions, training_layout
from accel.weights import metadata as schema
from accel.weights.tensor_files import cached_digest, file_stamps, mode_of

FOLDER = Path(__file__).resolve().parents[2] / "pretrained_models"
BASE_URL = "https://dl.fbaipublicfiles.com/DiT/models/"
# published names; the variable's name is upstream's
pretrained_models = {"DiT-XL-2-512x512.pt", "DiT-XL-2-256x256.pt"}

HUB_ID = re.compile(r"[\w.-]+/[\w.-]*[^\W\d][\w.-]*")  # owner/name, unlike DiT-XL/2
FILE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
# Modules with holds(path) and read(path, mapped) → (float tensors by name, the facts
# beside them). The first that holds a path reads it.
LAYOUTS = training_layout, diffusers_layout, consolidated_layout


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
            self._path = fetch_from_hub(self.name, "transformer/", "ckpt", remedy)
            if diffusers_layout.has_vae(self._path):
                fetch_from_hub(self.name, "vae/", "vae", "give another decoder by `vae`")
        return self._path

    def fetch(self) -> Path:
        """Download the weights if they are not here yet. Returns where they are. Raises
        UsageError.
        """
        if self.path.parent == FOLDER and not self.path.exists():
            _download(self.path)
        return self.path

    @cached_property
    def _opened(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        stamps = self._stamp()  # before opening: the content read is of this version or a newer one
        self._stamps = self._stamps or stamps
        with path_errors("ckpt", self.path):
            layout = next((one for one in LAYOUTS if one.holds(self.path)), None)
            if layout is None:
                raise UsageError(_no_layout(self.path))
            state, found = layout.read(self.path, self.mapped, self.entry)
            return state, schema.checked(self.path, found)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Return the float tensors under their family's names, on the CPU. Read-only.

        Raises UsageError if the file is damaged, holds no weights, or would execute code
        on load.
        """
        return self._opened[0]

    @property
    def metadata(self) -> dict[str, Any]:
        """Return the checked facts beside the tensors: a training run's arguments, a
        pipeline's configuration, or the converter's entries.
        """
        return self._opened[1]

    @contextmanager
    def reading(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the tensors, and let go of them, which are mapped. Raises UsageError if a file
        was changed since it was opened.
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
            stamps = self._stamps or self._stamp()
            self._digest = cached_digest(
                stamps, lambda: positions.trained(self.state), self.entry or ""
            )
        return self._digest

    def _stamp(self):
        """Return the stamps of every file that the weights may come from."""
        path = self.fetch()
        with path_errors("ckpt", path):
            files = (
                sorted(file for file in path.rglob("*") if file.is_file())
                if path.is_dir()
                else [path]
            )
        return file_stamps(files, "ckpt")


def open_checkpoint(name: str | Path, mapped: bool = True, entry: str | None = None) -> Checkpoint:
    """Return the weights that a name stands for, fetched and opened. Arguments, and errors:
    those of Checkpoint.
    """
    weights = Checkpoint(name, mapped, entry)
    weights.fetch()
    _ = weights.state
    return weights


def _no_layout(folder: Path) -> str:
    """Return the error for a folder in no layout. The one file of weights in it is named."""
    files = [file for file in sorted(folder.iterdir()) if file.suffix in FILE_SUFFIXES]
    if len(files) == 1:
        return f"`ckpt={folder}`: is a folder with one file of weights; give `ckpt={files[0]}`"
    return (
        f"`ckpt={folder}`: a folder must hold transformer/config.json and its weights (diffusers' "
        "layout), or consolidated.00-of-01.pth"
    )


def fetch_published() -> None:
    """Download all published weights that are missing here and print their paths; `python
    download.py` calls this.
    """
    for name in sorted(pretrained_models):
        try:
            print(Checkpoint(FOLDER / name).fetch())
        except UsageError as error:
            sys.exit(f"download.py: {error.by_flags()}")


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
    names = ", ".join(sorted(pretrained_models))
    raise UsageError(
        f"`ckpt={name}`: no such file; published names are {names}, a hub id is owner/name"
    )


def _download(target: Path) -> None:
    """Fetch published weights to `target`, with a progress bar. The file is whole or absent."""
    from tqdm import tqdm

    url = BASE_URL + target.name
    try:
        with (
            urllib.request.urlopen(url, timeout=30) as response,
            atomic_write(target, durable=True) as file,
        ):
            total = int(response.headers.get("Content-Length", 0)) or None
            with tqdm(total=total, unit="B", unit_scale=True, desc=target.name) as bar:
                while block := response.read(1 << 20):
                    file.write(block)
                    bar.update(len(block))
            if total is not None and file.tell() != total:
                raise OSError(f"the connection ended after {file.tell()} of {total} bytes")
    except (OSError, HTTPException) as error:  # URLError, time-outs and a full disk are OSErrors
        raise UsageError(
            f"`ckpt={target.name}`: download failed ({error}); try the hub's copy, "
            f"`ckpt=facebook/{target.stem.rpartition('x')[0]}`, or fetch {url} by other means and "
            f"put it at {target}"
        ) from None


def fetch_from_hub(repository: str, subfolder: str, parameter: str, remedy: str) -> Path:
    """Return the local copy of a hub repository: config and weights of `subfolder` ("" or
    a name with a slash) only. Of a repository with a .pt file of its own name, return
    that file, with the YAML and statistics beside it.

    A cached copy is not asked for again. Raises UsageError about `parameter`.
    """
    from huggingface_hub import snapshot_download

    def snapshot(suffix, **how):
        own = repository.rpartition("/")[2] + ".pt"
        small = [f"{subfolder}config.json", "*.yaml", "latents_stats.pt"]
        small += ["model_index.json", diffusers_layout.SCHEDULE] if subfolder else []
        weights = [
            own,
            *(f"{subfolder}diffusion_pytorch_model{end}" for end in (f"{suffix}*", f"-*{suffix}")),
        ]
        # weights last: an interrupted download is known by their absence
        for wanted in (small, weights):
            root = Path(snapshot_download(repository, allow_patterns=wanted, **how))
        if (root / own).is_file():
            return root / own
        diffusers_layout.weight_files(root / subfolder, parameter)
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
            f"`{parameter}={repository}`: not here, and fetching it from the hub failed "
            f"({reason}); {remedy}"
        ) from None
