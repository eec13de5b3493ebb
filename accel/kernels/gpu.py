"""The compute capability and name of a GPU, and whether the installed torch supports it."""

import os
import re
import warnings
from pathlib import Path

import torch

from accel.errors import UsageError

DRIVER_FILE = Path("/proc/driver/nvidia/version")  # exists while the NVIDIA driver is loaded
OLDEST_DRIVER = {"12": 525, "13": 580}  # of each major version of CUDA, from NVIDIA's table

# The compute capability that every GPU is taken to have, for tests and benchmarks.
emulated: tuple[int, int] | None = None


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU, or (0, 0) for other devices.

    All backend choices depend on it.
    """
    if device.type != "cuda" or is_amd(device):
        return 0, 0
    return emulated or torch.cuda.get_device_capability(device)


def is_amd(device: torch.device) -> bool:
    """Return whether a device is an AMD GPU. torch for ROCm calls it cuda, and gives it a
    capability, such as 9.0, that is not NVIDIA's.
    """
    return device.type == "cuda" and torch.version.hip is not None


def unused_gpu() -> str:
    """Return the reason why the installed torch cannot use the NVIDIA GPU whose driver is loaded,
    "" if there is no driver or no reason is known.
    """
    if not DRIVER_FILE.exists() or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA, but this machine has an NVIDIA GPU"
        )
    needed = OLDEST_DRIVER.get(torch.version.cuda.partition(".")[0], 0)
    found = re.search(r" ((\d+)\.[\d.]+) ", DRIVER_FILE.read_text())
    if found is None or int(found[2]) >= needed:
        return ""
    return (
        f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, which needs NVIDIA "
        f"driver {needed} or later; the driver is {found[1]}"
    )


def name(device: torch.device) -> str:
    """Return the GPU model, under which measurements are cached."""
    suffix = "" if emulated is None else f" as {emulated[0]}.{emulated[1]}"
    return torch.cuda.get_device_name(device) + suffix


def require(device: torch.device) -> None:
    """Raise UsageError if the GPU does not exist, or if the installed torch does not support it."""
    if not torch.cuda.is_available():
        raise UsageError(
            unused_gpu() or f"torch {torch.__version__} finds no CUDA GPU",
            "use `device=cpu`",
            parameter="device",
            value=device,
        )
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise UsageError(
            f"this machine has {count} GPU(s), counted from 0", parameter="device", value=device
        )
    remedy = torch_to_install(device)
    if remedy:
        raise UsageError(
            f"torch {torch.__version__} has no code for {torch.cuda.get_device_name(device)}",
            f"install {remedy}",
            parameter="device",
            value=device,
        )


def torch_to_install(device: torch.device) -> str | None:
    """Return the torch to install if the installed one does not support a GPU, else None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns in many lines
        major, minor = torch.cuda.get_device_capability(device)
    targets = [
        target.split("_")
        for target in torch.cuda.get_arch_list()
        if target.startswith(("sm_", "compute_"))
    ]
    for code, digits in targets:
        target = int(digits.rstrip("af"))
        # Machine code runs on GPUs with the same major and at least the same minor capability. PTX
        # runs on all later GPUs.
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
