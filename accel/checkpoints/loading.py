"""Load weights from files: a published name, a path or a hub id → tensors and their metadata. Also
upstream's functions to download and read published weights.
"""

import logging
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from pathlib import Path

import torch

from accel.checkpoints import Checkpoint, Contents, checkpoint_of
from accel.errors import InputRef, UsageError, path_errors
from accel.families import DEMO, FOLDER, Family, published_names
from accel.families.identify import NO_USER_FACTS, UserFacts, choose_family, families_with
from accel.families.spec import StateDict
from accel.tensors.digests import cached_digest
from accel.tensors.shapes import shapes_of
from accel.tensors.tables import trained
from accel.tensors.tensor_files import FILE_SUFFIXES, HUB_ID, file_stamps, mode_of

log = logging.getLogger(__name__)

pretrained_models = published_names()  # the variable's name is upstream's
# Modules with matches(path) and read(path, given, entry) → Contents. The first format whose
# matches(path) is true reads the file; later ones are not imported.
FORMATS = "single_file", "diffusers_folder", "consolidated"


class _ReadAgain(InputRef):
    """A file whose notices are printed already."""

    def warn(self, text: str) -> None:
        pass


class WeightFiles:
    """Weights on disk or on the hub, fetched and opened on first use.

    given: a published name, a .pt or .safetensors file, a folder in diffusers' layout or with
    consolidated weights, or a hub id (owner/name). entry: the section of a training checkpoint with
    the weights; default: the moving average, else the first known section. Raises UsageError for an
    unknown name, before fetching.
    """

    def __init__(self, given: InputRef, entry: str | None = None):
        self.given = given
        self.entry = entry
        self._path = _locate(given)  # None: a hub id, not fetched yet
        self._stamps: list[tuple] | None = None  # of the files when they were first opened

    @property
    def path(self) -> Path:
        """Return the path of the weights. Fetch a hub id, but no published weights."""
        if self._path is None:
            name = self.given.name
            remedy = f"fetch https://huggingface.co/{name} by other means and give its folder"
            from accel.checkpoints import diffusers_folder  # lazy imports: only for hub ids
            from accel.tensors import fetch

            self._path = fetch.from_hub(name, "transformer/", self.given.option, remedy)
            if diffusers_folder.has_vae(self._path, self.given.option):
                fetch.from_hub(name, "vae/", "vae", "give another decoder by `vae`")
        return self._path

    @property
    def is_here(self) -> bool:
        """Return whether the weights are on this machine."""
        return self._path is not None and self._path.exists()

    def fetch(self) -> Path:
        """Download missing weights, and return their path. Raises UsageError."""
        if self.path.parent == FOLDER and not self.path.exists():
            from accel.tensors import fetch

            fetch.download(self.path, self.given.option)
        return self.path

    @cached_property
    def contents(self) -> Contents:
        """Return the float tensors on the CPU under the names in the family's files, and metadata:
        training arguments, a pipeline's configuration, or entries of the converter. Raises
        UsageError if the file is corrupt, has no weights, or would execute code on load.
        """
        stamps = self._stamp()  # before reading, so that a change meanwhile is noticed
        self._stamps = self._stamps or stamps
        with path_errors(self.given.option, self.path):
            formats = (import_module(f"accel.checkpoints.{name}") for name in FORMATS)
            format_ = next((each for each in formats if each.matches(self.path)), None)
            if format_ is None:
                if any(self.path.glob("*.distcp")) or any(self.path.glob("*/*.distcp")):
                    raise self.given.error(
                        "is a distributed checkpoint, whose tensors lie in parts",
                        "join them by torch.distributed.checkpoint.format_utils.dcp_to_torch_save",
                    )
                raise self.given.error(
                    "a folder must hold transformer/config.json and its weights (diffusers' "
                    "layout), or consolidated.00-of-01.pth",
                    "give such a folder, or a file",
                )
            return format_.read(self.path, self.given, self.entry)

    @property
    def state(self) -> StateDict:
        """Return the tensors. Read-only."""
        return self.contents.state

    def checkpoint(self, user_facts: UserFacts = NO_USER_FACTS) -> Checkpoint:
        """Identify the network and return its checkpoint. user_facts: the user's options."""
        return checkpoint_of(self.given, self, self.contents.facts, user_facts, self.path)

    @contextmanager
    def reading(self) -> Iterator[StateDict]:
        """Yield the tensors. Afterwards free them, which closes mapped files. Raises UsageError if
        a file changed since it was opened.
        """
        yield self.state
        self.__dict__.pop("contents", None)
        self._require_unchanged()

    def _require_unchanged(self):
        if self._stamps not in (None, self._stamp()):
            raise self.given.error("was changed while it was read", "start again when it is whole")

    def digest(self) -> str:
        """Return a hash of the trained values, 16 hex digits. A sine-cosine position table is not
        trained.

        The first call for a file reads all of it; the result is cached on disk.
        """
        files = self
        if "contents" not in self.__dict__:  # map the file again: the tensors are not kept
            self._require_unchanged()
            files = WeightFiles(_ReadAgain(*self.given), self.entry)
        stamps = self._stamps or self._stamp()
        return cached_digest(stamps, lambda: trained(files.state), self.entry or "")

    def _stamp(self):
        """Return the stamps of all files that may contain the weights."""
        path = self.fetch()
        with path_errors(self.given.option, path):
            inside = path.rglob("*") if path.is_dir() else [path]
            files = sorted(file for file in inside if file.is_file())
        return file_stamps(files, self.given.option)


def _locate(given: InputRef) -> Path | None:
    """Resolve a name to a path, which for published weights may not exist yet; None for a hub
    id.
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
    if path.parent == DEMO:
        raise given.error(
            "ships with the repository, not with the package",
            "set DIT_WEIGHTS to its pretrained_models, or give other weights",
        )
    names = ", ".join(sorted(pretrained_models))
    raise given.error("no such file", f"published names are {names}, a hub id is owner/name")


# ---- Published weights ----


def find_model(name_or_path: str | Path) -> dict[str, torch.Tensor]:
    """Load a state dict under the reference network's names, as upstream's `find_model`. If no
    family matches, return it unchanged. name_or_path: as for --ckpt. Raises UsageError.
    """
    weights = WeightFiles(InputRef(str(name_or_path)))
    shapes = shapes_of(weights.state)
    if not families_with(shapes):
        return weights.state
    family, *_ = choose_family(weights.given, shapes, weights.contents.facts)
    return family.weights.convert(weights.state)


def download_model(name: str) -> dict[str, torch.Tensor]:
    """Return the state dict of published weights, as upstream's `download_model`. Download them on
    first use. Raises UsageError for an unknown name.
    """
    return find_model(name)


def fetch_published() -> None:
    """Download all missing published weights, and print the paths (`python download.py`)."""
    for name in sorted(pretrained_models):
        try:
            log.info(str(WeightFiles(InputRef(str(FOLDER / name))).fetch()))
        except UsageError as error:
            sys.exit(f"download.py: {error.by_flags()}")


def published_name(family: Family, model: str, image_size: int, num_classes: int) -> str:
    """Return the name of a model's published weights. Raises UsageError if there are none."""
    implied = family.models[model]
    if image_size in implied.published and num_classes == implied.num_classes:
        return implied.published[image_size]
    if family.fetch:
        raise UsageError(
            f"{model} needs a file",
            f"the family's are fetched by: {family.fetch}",
            parameter="ckpt",
        )
    raise UsageError(
        f"no published weights for {model} at {image_size} px with {num_classes} classes; the "
        f"names are {', '.join(sorted(pretrained_models))}",
        "give a file or a folder",
        parameter="ckpt",
    )
