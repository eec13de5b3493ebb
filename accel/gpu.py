"""A GPU's generation and name, and whether the installed torch has code for it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from accel.errors import UsageError

_seen_as = None  # a capability in place of the GPUs' own


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, by which every choice of a backend goes;
    (0, 0) for other devices.
    """
    if device.type != "cuda":
        return 0, 0
    return _seen_as or torch.cuda.get_device_capability(device)


def name(device: torch.device) -> str:
    """Return the kind of GPU, under which measurements are kept."""
    model = torch.cuda.get_device_name(device)
    return model if _seen_as is None else f"{model} as {_seen_as[0]}.{_seen_as[1]}"


@contextmanager
def seen_as(other: tuple[int, int]) -> Iterator[None]:
    """Treat every GPU as one of compute capability `other`. For tests and benchmarks only."""
    global _seen_as  # noqa: PLW0603
    before = _seen_as
    _seen_as = other
    try:
        yield
    finally:
        _seen_as = before


def require(device: torch.device) -> None:
    """Raise UsageError unless this machine has the GPU, and the installed torch has code for it."""
    if not torch.cuda.is_available():
        raise UsageError(
            f"`device={device}`: torch {torch.__version__} finds no CUDA GPU; use `device=cpu`"
        )
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise UsageError(f"`device={device}`: this machine has {count} GPU(s), counted from 0")
    remedy = missing_code(device)
    if remedy:
        raise UsageError(
            f"`device={device}`: torch {torch.__version__} has no code for "
            f"{torch.cuda.get_device_name(device)}; install {remedy}"
        )


def missing_code(device: torch.device) -> str | None:
    """Return the torch to install if the installed one has no code for a GPU, else None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, many lines long
        major, minor = torch.cuda.get_device_capability(device)
    targets = [
        target.split("_")
        for target in torch.cuda.get_arch_list()
        if target.startswith(("sm_", "compute_"))
    ]
    for code, digits in targets:
        target = int(digits.rstrip("af"))
        # Machine code runs on later GPUs of its generation; PTX, which the driver
        # compiles, on all later ones.
        if target <= 10 * major + minor and (code == "compute" or target // 10 == major):
            return None
    if not targets:  # not NVIDIA's
        return None
    if (major, minor) < (7, 0):
        return "a build for CUDA 12.6"
    return (
        "torch 2.10.0 from PyPI, or a build for CUDA 12.6"
        if major == 7
        else "a build for CUDA 12.8 or later"
    )
