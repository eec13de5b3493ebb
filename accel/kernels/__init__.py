"""Kernels, a folder an op. Small ops are one file.

    __init__.py                 the op and its choice of backend
    reference.py                plain torch
    triton.py, hopper.py, .cu   the kernels

cuda.py compiles, loads and launches CUDA text; hopper.cuh is device code that Hopper's kernels
share.
"""

import hashlib
from pathlib import Path

from accel.io.filesystem import atomic_write, read_json

FOLDER = Path(__file__).parent
SOURCES = {".py", ".cu", ".cuh", ".json"}


def version() -> str:
    """Return a short hash of the kernels' source files, which an FID job records."""
    digest = hashlib.sha256()
    for file in sorted(FOLDER.rglob("*")):
        if file.suffix in SOURCES:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def check_backend(op: str, backend: str, backends: tuple[str, ...]) -> None:
    """Raise ValueError unless an op has this backend."""
    if backend not in backends:
        raise ValueError(f"{op}: backend {backend!r}: one of {', '.join(backends)}")


def read_cache(file: Path) -> dict:
    """Return the JSON object in a file of a cache; an empty one if it is absent or damaged.

    What it held is then measured again.
    """
    try:
        return read_json(file)
    except (OSError, ValueError):
        return {}


def write_cache(file: Path, content: bytes) -> bool:
    """Write a file of a cache and return whether it is there.

    Where it cannot be written every process compiles or measures for itself.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file, through_link=False) as out:
            out.write(content)
    except OSError:
        return False
    return True
