"""Everything that makes sampling fast. models.py and diffusion/ know nothing of it.

`from accel import Sampler`: pictures from Python, from a network that is loaded once
(docs/python.md). `from accel import accelerate`: a fast copy of a DiT that you already
have, for your own sampling loop.
"""

from importlib import import_module

# Imported on first use, since they import torch and Triton.
LAZY_EXPORTS = {"Sampler": "accel.sampler", "accelerate": "accel.accelerated"}


def __getattr__(name: str):
    if name in LAZY_EXPORTS:
        return getattr(import_module(LAZY_EXPORTS[name]), name)
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        from accel.io.filesystem import checkout_version

        try:
            return checkout_version() or version("dit-sampling")
        except PackageNotFoundError:  # copied into another project
            return "unknown"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
