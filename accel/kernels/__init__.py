"""Kernels: one folder per op; small ops are one file.

    __init__.py                 the op and its choice of backend
    reference.py                plain torch
    triton.py, hopper.py, .cu   the kernels

cuda.py compiles, loads and launches CUDA source; hopper.cuh is device code that the kernels for
Hopper share.
"""

import hashlib
from contextlib import suppress
from pathlib import Path

from accel.io.filesystem import atomic_write

FOLDER = Path(__file__).parent
SOURCES = {".py", ".cu", ".cuh", ".json"}


def version() -> str:
    """Return a short hash of the kernels' source files. FID jobs record it."""
    digest = hashlib.sha256()
    for file in sorted(FOLDER.rglob("*")):
        if file.suffix in SOURCES:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def write_cache(file: Path, content: bytes) -> None:
    """Write a cache file if it can be written: a cache is optional."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file, through_link=False) as out:
            out.write(content)
