"""Pickles of torch.save: tensors and plain data, read without running anything in them."""

import argparse
import pickle
import re
import warnings
import zipfile
from itertools import product
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from accel.errors import about, as_usage_error, path_errors, shown
from accel.io.filesystem import is_utf8, open_regular
from accel.tensors.shapes import SHARD_ERROR

COPY_AGAIN = "delete it, then copy or download it again"  # the remedy for an incomplete file
# numpy's numbers and texts that a pickle may hold.
DTYPE_CHARS = "?bBhHiIlLqQefdFDUS"


def read_pickle(
    path: Path, parameter: str, wanted: type, meaning: str, mapped: bool = False
) -> Any:
    """Return the content of a file of torch.save, an object of type `wanted`; meaning: that type
    in words. Raises UsageError about `parameter`.
    """
    error = about(parameter, path)
    try:
        safe = torch.serialization.safe_globals(_plain_data())
        with path_errors(parameter, path), safe, warnings.catch_warnings():
            open_regular(path).close()  # torch has errors of its own for pipes and permissions
            warnings.simplefilter("ignore")  # about the format, of interest to torch's developers
            content = torch.load(
                path, map_location="cpu", weights_only=True, mmap=mapped and _is_mappable(path)
            )
    except pickle.UnpicklingError as reason:
        if "DTensor" in str(reason):
            raise error(*SHARD_ERROR) from None
        code = re.search(r"(?:GLOBAL|class) '?([\w.]+)", str(reason))
        if code is None:  # another kind of file, or the half of one
            raise error("truncated or not a checkpoint", COPY_AGAIN) from None
        raise error(
            f"refused, loading it would run code ({code[1]})", "save its state dict with torch.save"
        ) from None
    except Exception as reason:  # an unpickler ends in whatever the bytes happen to mean
        words = (str(reason).splitlines() or [type(reason).__name__])[0]
        text = f"truncated or not a checkpoint ({shown(words, 120)})"
        raise (as_usage_error(reason) or error(text, COPY_AGAIN)) from None
    if not isinstance(content, wanted):
        raise error(f"holds a {type(content).__name__}, not {meaning}")
    return content


def _plain_data() -> list:
    """Return the classes, with their names in pickles, that training scripts store beside the
    weights: plain data. A path becomes a pure one, of no file.
    """
    scalar = np.float64(0).__reduce__()[0]
    array = np.zeros(1).__reduce__()[0]
    dtypes = {type(np.dtype(name)) for name in DTYPE_CHARS}
    pure = product(("pathlib", "pathlib._local"), ("", "Pure"), (PurePosixPath, PureWindowsPath))
    paths = [
        (path, f"{module}.{prefix}{path.__name__.removeprefix('Pure')}")
        for module, prefix, path in pure
    ]
    of_numpy = [
        (function, f"numpy.{core}.multiarray.{name}")
        for core in ("core", "_core")
        for name, function in (("scalar", scalar), ("_reconstruct", array))
    ]
    return [
        *(argparse.Namespace, SimpleNamespace, dict, list, set, tuple, int, float, bool, str),
        (_dict_for, "collections.defaultdict"),
        *(np.ndarray, np.dtype, *dtypes, *of_numpy, *paths),
    ]


def _dict_for(factory: Any = None) -> dict:
    """Return a dict in place of a defaultdict, into which torch's unpickler sets no items."""
    return {}


def _is_mappable(path: Path) -> bool:
    """Return whether torch may map the file: a zip archive of uncompressed members,
    torch.save's format since 1.6, with a name that torch can pass on.
    """
    if not is_utf8(path) or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return all(member.compress_type == zipfile.ZIP_STORED for member in archive.infolist())
