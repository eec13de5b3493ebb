"""Weights in files: a published name, a path or a hub id → tensors and the facts beside them,
opened once a run, checked.
"""

import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from accel.checkpoints import Checkpoint, Contents, spec_of
from accel.errors import InputRef, path_errors, shown
from accel.families.identify import NO_USER_FACTS, UserFacts
from accel.families.spec import StateDict
from accel.io.filesystem import weights_folder
from accel.tensors.tensor_files import FILE_SUFFIXES, HUB_ID, file_stamps, mode_of

FOLDER = weights_folder()
# published names; the variable's name is upstream's
pretrained_models = {"DiT-XL-2-512x512.pt", "DiT-XL-2-256x256.pt"}
# Modules with matches(path) and read(path, given, mapped, entry) → Contents. The first that holds a
# path reads it; later ones are not imported.
FORMATS = "safetensors_file", "training", "diffusers_folder", "consolidated"

PART = ".distcp"  # of a distributed checkpoint
IN_PARTS = (
    "is a distributed checkpoint, whose tensors lie in parts",
    "join them by torch.distributed.checkpoint.format_utils.dcp_to_torch_save",
)


class Files:
    """The weights that a name stands for, fetched and opened when they are first needed.

    given: a published name, a .pt or .safetensors file, a folder in diffusers' layout or with
    consolidated weights, or a hub id (owner/name). mapped: tensors are mapped where the format
    allows it, else copies. entry: of a training file, the entry with the weights; default: the
    moving average's, else the first that is known. Raises UsageError if it names nothing, before
    anything is fetched.
    """

    def __init__(self, given: InputRef, mapped: bool = True, entry: str | None = None):
        self.given = given
        self.mapped = mapped
        self.entry = entry
        self._path = _locate(given)  # None: on the hub
        self._stamps: list[tuple] | None = None  # of the files that were opened first
        self._digest: str | None = None

    @property
    def path(self) -> Path:
        """Return the path of the weights; of published weights the path after fetching.
        Fetch a hub id for this.
        """
        if self._path is None:
            name = self.given.name
            remedy = f"fetch https://huggingface.co/{name} by other means and give its folder"
            from accel.checkpoints import diffusers_folder  # local weights need neither
            from accel.tensors import fetch

            self._path = fetch.from_hub(name, "transformer/", self.given.option, remedy)
            if diffusers_folder.has_vae(self._path, self.given.option):
                fetch.from_hub(name, "vae/", "vae", "give another decoder by `vae`")
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
            from accel.tensors import fetch

            fetch.download(self.path, self.given.option)
        return self.path

    @cached_property
    def contents(self) -> Contents:
        """Return the float tensors under their family's names, on the CPU, and the facts next to
        them: a training run's arguments, a pipeline's configuration, or the converter's entries.
        Raises UsageError if the file is corrupt, has no weights, or would execute code on load.
        """
        stamps = self._stamp()  # before opening: the content read is of this version or a newer one
        self._stamps = self._stamps or stamps
        if self.path.suffix == PART:
            raise self.given.error(*IN_PARTS)
        with path_errors(self.given.option, self.path):
            layouts = (import_module(f"accel.checkpoints.{name}") for name in FORMATS)
            layout = next((layout for layout in layouts if layout.matches(self.path)), None)
            if layout is None:
                raise self.given.error(*_no_layout(self.path, self.given.option))
            return layout.read(self.path, self.given, self.mapped, self.entry)

    @property
    def state(self) -> StateDict:
        """Return the tensors of `contents`. Read-only."""
        return self.contents.state

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return the facts of `contents`."""
        return self.contents.facts

    def checkpoint(self, user_facts: UserFacts = NO_USER_FACTS) -> Checkpoint:
        """Return the checkpoint with these weights. user_facts: what the user says of them."""
        spec = spec_of(self.given, self.state, self.facts, user_facts, self._arguments_beside)
        return Checkpoint(self.given, spec, self)

    def _arguments_beside(self):
        from accel.checkpoints import beside  # few families have such a file

        return beside.arguments_beside(self.path, self.given)

    @contextmanager
    def reading(self) -> Iterator[StateDict]:
        """Yield the tensors. Afterwards drop them, so that the mapped files are closed. Raises
        UsageError if a file was changed since it was opened.
        """
        yield self.state
        self.__dict__.pop("contents", None)
        self._require_unchanged()

    def _require_unchanged(self):
        if self._stamps not in (None, self._stamp()):
            raise self.given.error("was changed while it was read", "start again when it is whole")

    def digest(self) -> str:
        """Return 16 hex digits of all values that were trained. A position table counts
        unless it is the sine-cosine table, which is a function of the grid.

        The first call for a file reads all of it; the cache folder keeps the result for
        later runs.
        """
        if self._digest is None:
            if "contents" not in self.__dict__:
                self._require_unchanged()
            from accel.tensors.digests import cached_digest  # a grid needs none
            from accel.tensors.positions import trained

            stamps = self._stamps or self._stamp()
            self._digest = cached_digest(stamps, lambda: trained(self.state), self.entry or "")
        return self._digest

    def same_as(self, other: Any) -> bool:
        """Return whether both are the same entry of the same file."""
        of_file = getattr(other, "entry", self) == self.entry
        return of_file and self.path.samefile(other.path)

    def _stamp(self):
        """Return the stamps of every file that the weights may come from."""
        path = self.fetch()
        with path_errors(self.given.option, path):
            inside = path.rglob("*") if path.is_dir() else [path]
            files = sorted(file for file in inside if file.is_file())
        return file_stamps(files, self.given.option)


def _no_layout(folder: Path, option: str) -> tuple[str, str]:
    """Return problem and remedy of a folder in no layout. Files of weights in it are named."""
    names = sorted(file.name for file in folder.iterdir())
    if any(folder.glob(f"*{PART}")) or any(folder.glob(f"*/*{PART}")):
        return IN_PARTS
    weights = [name for name in names if name.endswith(FILE_SUFFIXES)]
    if weights:
        return (
            f"is a folder with files of weights, {shown(', '.join(weights), 200)}",
            f"give one of them, such as `{option}={folder / weights[-1]}`",
        )
    return (
        "a folder must hold transformer/config.json and its weights (diffusers' layout), or "
        "consolidated.00-of-01.pth",
        "",
    )


def _locate(given: InputRef) -> Path | None:
    """Return the path that a name stands for, of published weights also where they will
    be; None for a hub id.
    """
    name = given.name
    path = Path(name)
    mode = mode_of(path, given.option)
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return path
    if mode:
        raise given.error("is a pipe, a socket or a device", "give a file or a folder")
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
        raise given.error(
            "ships with the repository, not with the package",
            f"copy its pretrained_models/demo to {path.parent}, or give other weights",
        )
    names = ", ".join(sorted(pretrained_models))
    raise given.error("no such file", f"published names are {names}, a hub id is owner/name")
