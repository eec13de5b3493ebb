"""Read pickles of torch.save: tensors and plain data, without executing code."""

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

from accel.errors import InputRef, as_usage_error, path_errors, shown
from accel.io.filesystem import is_utf8, open_regular
from accel.tensors.shapes import SHARD_ERROR

COPY_AGAIN = "delete it, then copy or download it again"
# dtypes of numpy numbers and strings that a pickle may contain
DTYPE_CHARS = "?bBhHiIlLqQefdFDUS"


def read_pickle(path: Path, parameter: str, wanted: type, meaning: str) -> Any:
    """Read a file of torch.save that contains an object of type `wanted`. meaning: that type as
    text. Raises UsageError about `parameter`.
    """
    given = InputRef(str(path), parameter)
    try:
        safe = torch.serialization.safe_globals(_plain_data())
        with path_errors(parameter, path), safe, warnings.catch_warnings():
            open_regular(path).close()  # torch's errors for pipes and permissions are unclear
            warnings.simplefilter("ignore")  # about the file format
            content = torch.load(
                path, map_location="cpu", weights_only=True, mmap=_is_mappable(path)
            )
    except pickle.UnpicklingError as reason:
        if "DTensor" in str(reason):
            raise given.error(*SHARD_ERROR) from None
        code = re.search(r"(?:GLOBAL|class) '?([\w.]+)", str(reason))
        if code is None:  # another or an incomplete file
            raise given.error("truncated or not a checkpoint", COPY_AGAIN) from None
        raise given.error(
            f"refused, loading it would run code ({code[1]})", "save its state dict with torch.save"
        ) from None
    except Exception as reason:  # corrupt pickles can raise any exception
        first_line = (str(reason).splitlines() or [type(reason).__name__])[0]
        problem = f"truncated or not a checkpoint ({shown(first_line, 120)})"
        raise (as_usage_error(reason) or given.error(problem, COPY_AGAIN)) from None
    if not isinstance(content, wanted):
        raise given.error(f"contains a {type(content).__name__}, not {meaning}")
    return content


def _plain_data() -> list:
    """List the classes, with their names in pickles, of data that training scripts store next to
    the weights. Paths become pure paths, which cannot access files.
    """
    scalar = np.float64(0).__reduce__()[0]
    array = np.zeros(1).__reduce__()[0]
    dtypes = {type(np.dtype(name)) for name in DTYPE_CHARS}
    modules = "pathlib", "pathlib._local"
    path_classes = product(modules, ("", "Pure"), (PurePosixPath, PureWindowsPath))
    paths = [
        (path, f"{module}.{prefix}{path.__name__.removeprefix('Pure')}")
        for module, prefix, path in path_classes
    ]
    numpy_functions = [
        (function, f"numpy.{core}.multiarray.{name}")
        for core in ("core", "_core")
        for name, function in (("scalar", scalar), ("_reconstruct", array))
    ]
    return [
        *(argparse.Namespace, SimpleNamespace, dict, list, set, tuple, int, float, bool, str),
        (_dict_for, "collections.defaultdict"),
        *(np.ndarray, np.dtype, *dtypes, *numpy_functions, *paths),
    ]


def _dict_for(factory: Any = None) -> dict:
    """Replace defaultdict, whose items torch's restricted unpickler does not set."""
    return {}


def _is_mappable(path: Path) -> bool:
    """Whether torch can memory-map the file: an uncompressed zip archive, the format of torch.save
    since 1.6, with a UTF-8 name.
    """
    if not is_utf8(path) or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return all(member.compress_type == zipfile.ZIP_STORED for member in archive.infolist())
