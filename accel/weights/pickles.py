"""Pickles of torch.save: tensors and plain data, read without running anything in them."""

import argparse
import pickle
import re
import warnings
import zipfile
from itertools import product
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch

from accel.errors import UsageError, as_usage_error, path_errors
from accel.files import is_utf8, open_regular

# numpy's numbers and texts that a pickle may hold.
NUMBERS = "?", "b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "e", "f", "d", "U"


def read_pickle(
    path: Path, parameter: str, wanted: type, meaning: str, mapped: bool = False
) -> Any:
    """Return the content of a file of torch.save, an object of type `wanted`; meaning: that type
    in words. Raises UsageError about `parameter`.
    """
    damaged = UsageError(f"`{parameter}={path}`: truncated or not a checkpoint; copy it again")
    try:
        safe = torch.serialization.safe_globals(_plain_data())
        with path_errors(parameter, path), safe, warnings.catch_warnings():
            open_regular(path).close()  # torch has errors of its own for pipes and permissions
            warnings.simplefilter("ignore")  # about the format, of interest to torch's developers
            content = torch.load(
                path, map_location="cpu", weights_only=True, mmap=mapped and _can_be_mapped(path)
            )
    except pickle.UnpicklingError as error:
        code = re.search(r"(?:GLOBAL|class) (\S+)", str(error))
        if code is None:  # another kind of file, or the half of one
            raise damaged from None
        raise UsageError(
            f"`{parameter}={path}`: refused, loading it would run code ({code[1]}); save its "
            "state dict with torch.save"
        ) from None
    except Exception as error:  # an unpickler ends in whatever the bytes happen to mean
        raise (as_usage_error(error) or damaged) from None
    if not isinstance(content, wanted):
        raise UsageError(f"`{parameter}={path}`: holds a {type(content).__name__}, not {meaning}")
    return content


def _plain_data() -> list:
    """Return the classes, with their names in pickles, that training scripts store beside the
    weights in their parsed arguments: plain data. A path becomes a pure one, of no file.
    """
    scalar = np.float64(0).__reduce__()[0]
    dtypes = {type(np.dtype(name)) for name in NUMBERS}
    pure = product(("pathlib", "pathlib._local"), ("", "Pure"), (PurePosixPath, PureWindowsPath))
    paths = [
        (path, f"{module}.{prefix}{path.__name__.removeprefix('Pure')}")
        for module, prefix, path in pure
    ]
    scalars = [(scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    return [argparse.Namespace, np.dtype, *dtypes, *scalars, *paths]


def _can_be_mapped(path: Path) -> bool:
    """Return whether torch may map the file: a zip archive of uncompressed members,
    torch.save's format since 1.6, with a name that torch can pass on.
    """
    if not is_utf8(path) or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return all(member.compress_type == zipfile.ZIP_STORED for member in archive.infolist())
