"""Download weights: published files from their URL, other weights from the Hugging Face hub."""

import re
import shutil
import urllib.request
import zipfile
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

from tqdm.utils import CallbackIOWrapper

from accel.errors import InputRef, UsageError
from accel.io.filesystem import atomic_write, place_for, remove_partial_files
from accel.io.progress import progress
from accel.tensors.diffusers_names import SCHEDULE
from accel.tensors.tensor_files import weight_files

BASE_URL = "https://dl.fbaipublicfiles.com/DiT/models/"


def download(target: Path, parameter: str) -> None:
    """Download published weights to `target` atomically, with a progress bar. A file that another
    process has created meanwhile is kept. Raises UsageError about `parameter`.
    """
    url = BASE_URL + target.name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            urllib.request.urlopen(url, timeout=30) as response,
            atomic_write(target, "w+b", durable=True, replace=False) as file,
        ):
            total = response.length  # None if unknown
            with progress(
                total=total, desc=target.name, unit="B", unit_scale=True, unit_divisor=1024
            ) as bar:
                shutil.copyfileobj(CallbackIOWrapper(bar.update, response, "read"), file)
            if total is not None and file.tell() != total:
                raise OSError(f"the connection ended after {file.tell()} of {total} bytes")
            if not zipfile.is_zipfile(file):
                raise OSError("the answer is not a complete .pt file; is it a login page?")
        remove_partial_files(target.parent, re.escape(target.name))  # left by killed processes
    except (OSError, HTTPException) as error:  # URLError, time-outs and a full disk are OSErrors
        copy = f"facebook/{target.stem.rpartition('x')[0]}"
        raise InputRef(target.name, parameter).error(
            f"download failed ({error})",
            f"try the hub's copy, `{parameter}={copy}`, or fetch {url} by other means and put it "
            f"at {place_for(target.name, target.parent)}",
        ) from None


def from_hub(repository: str, subfolder: str, parameter: str, remedy: str) -> Path:
    """Download config and weights of `subfolder` ("" or a name with a slash) of a hub repository.
    Return the local folder; if the repository has a .pt file of its own name, return that file,
    next to which YAML and statistics are downloaded.

    A cached copy is used without a request. Raises UsageError about `parameter`.
    """
    from huggingface_hub import snapshot_download

    def snapshot(suffix, **options):
        own_file = repository.rpartition("/")[2] + ".pt"
        small = [f"{subfolder}config.json", "*.yaml", "latents_stats.pt"]
        small += ["model_index.json", SCHEDULE] if subfolder else []
        weights = [
            own_file,
            *(f"{subfolder}diffusion_pytorch_model{end}" for end in (f"{suffix}*", f"-*{suffix}")),
        ]
        # weights last: without them the download is known to be incomplete
        for wanted in (small, weights):
            root = Path(snapshot_download(repository, allow_patterns=wanted, **options))
        if (root / own_file).is_file():
            return root / own_file
        weight_files(root / subfolder, parameter)
        return root

    with suppress(Exception):  # not cached, or incomplete
        return snapshot(".safetensors", local_files_only=True)
    try:
        with suppress(UsageError):  # the repository has pickles only
            return snapshot(".safetensors")
        return snapshot(".bin")
    except Exception as error:  # networks can raise any exception
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        raise InputRef(repository, parameter).error(
            f"not here, and fetching it from the hub failed ({reason})", remedy
        ) from None
