"""Fetch weights: published files from their address, others from the hub."""

import re
import shutil
import urllib.request
import zipfile
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

from tqdm import tqdm

from accel.errors import UsageError, about
from accel.io.filesystem import atomic_write, remove_partial_files
from accel.tensors.diffusers_names import SCHEDULE
from accel.tensors.tensor_files import weight_files

BASE_URL = "https://dl.fbaipublicfiles.com/DiT/models/"


def download(target: Path, parameter: str) -> None:
    """Fetch published weights to `target`, with a progress bar. The file is whole or absent; one
    that another process fetched meanwhile stays. Raises UsageError about `parameter`.
    """
    url = BASE_URL + target.name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            urllib.request.urlopen(url, timeout=30) as response,
            atomic_write(target, "w+b", durable=True, replace=False) as file,
        ):
            total = response.length  # None where the server names none
            with tqdm.wrapattr(response, "read", total=total, desc=target.name) as stream:
                shutil.copyfileobj(stream, file)
            if total is not None and file.tell() != total:
                raise OSError(f"the connection ended after {file.tell()} of {total} bytes")
            if not zipfile.is_zipfile(file):
                raise OSError("the answer is no whole .pt file; is it a login page?")
        remove_partial_files(target.parent, re.escape(target.name))  # of killed processes
    except (OSError, HTTPException) as error:  # URLError, time-outs and a full disk are OSErrors
        copy = f"facebook/{target.stem.rpartition('x')[0]}"
        raise about(parameter, target.name)(
            f"download failed ({error})",
            f"try the hub's copy, `{parameter}={copy}`, or fetch {url} by other means and put it "
            f"at {target}",
        ) from None


def from_hub(repository: str, subfolder: str, parameter: str, remedy: str) -> Path:
    """Return the local copy of a hub repository: config and weights of `subfolder` ("" or
    a name with a slash) only. Of a repository with a .pt file of its own_file name, return
    that file, with the YAML and statistics beside it.

    A cached copy is not asked for again. Raises UsageError about `parameter`.
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
        # weights last: an interrupted download is known by their absence
        for wanted in (small, weights):
            root = Path(snapshot_download(repository, allow_patterns=wanted, **options))
        if (root / own_file).is_file():
            return root / own_file
        weight_files(root / subfolder, parameter)
        return root

    with suppress(Exception):  # not cached, or not whole
        return snapshot(".safetensors", local_files_only=True)
    try:
        with suppress(UsageError):  # the repository has pickles only
            return snapshot(".safetensors")
        return snapshot(".bin")
    except Exception as error:  # a network fails in many ways; the remedy is the same
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        raise about(parameter, repository)(
            f"not here, and fetching it from the hub failed ({reason})", remedy
        ) from None
