"""What a GPU is: its generation, its name, and whether the installed torch has code for it.

Every choice that depends on a GPU's generation asks `capability`. `seen_as` lets tests and benchmarks see another one.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_seen_as = None  # a capability in place of the GPUs' own


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU; (0, 0) for other devices."""
    if device.type != "cuda":
        return 0, 0
    return _seen_as or torch.cuda.get_device_capability(device)


def name(device: torch.device) -> str:
    """The kind of GPU. What was measured on a kind is kept under this name."""
    kind = torch.cuda.get_device_name(device)
    return kind if _seen_as is None else f"{kind} as {_seen_as[0]}.{_seen_as[1]}"


@contextmanager
def seen_as(other: tuple[int, int]) -> Iterator[None]:
    """Inside, every GPU counts as one of compute capability `other`. For tests and benchmarks only."""
    global _seen_as  # noqa: PLW0603
    before, _seen_as = _seen_as, other
    try:
        yield
    finally:
        _seen_as = before


def missing_code(device: torch.device) -> str | None:
    """Where the installed torch has no code for a GPU: what to install. None where it has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, many lines long
        major, minor = torch.cuda.get_device_capability(device)
    targets = [target.split("_") for target in torch.cuda.get_arch_list() if target.startswith(("sm_", "compute_"))]
    for kind, digits in targets:
        target = int(digits.rstrip("af"))
        # Machine code runs on later GPUs of its generation; PTX, which the driver compiles, on all later ones.
        if target <= 10 * major + minor and (kind == "compute" or target // 10 == major):
            return None
    if not targets:  # not NVIDIA's
        return None
    if (major, minor) < (7, 0):
        return "a build for CUDA 12.6"
    return "torch 2.10.0 from PyPI, or a build for CUDA 12.6" if major == 7 else "a build for CUDA 12.8 or later"
