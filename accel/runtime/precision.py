"""Precision tiers: a run's arithmetic, and torch's backend switches for it. Their help is
in accel/config/options.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from accel.errors import about


class Tier(NamedTuple):
    """A tier's dtype and hardware."""

    dtype: torch.dtype = torch.float32  # of the GEMMs' operands and results
    capability: tuple[int, int] = (0, 0)  # the least compute capability; (0, 0): any device
    hardware: str = ""
    accelerated: bool = False  # runs as a network of accel/fast; the others run the reference model


# torch's switches of float32 arithmetic on a GPU, then those of a CPU. One at "none" follows
# the wider ones. Whoever sets `allow_tf32` sets these too, but not the reverse, and torch
# raises an error where the two differ: only these are used here.
GEMMS: Any = torch.backends.cuda.matmul
CONVOLUTIONS: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
CPU: Any = torch.backends.mkldnn
SWITCHES: dict[Any, tuple] = {
    GEMMS: (torch.backends.cudnn, torch.backends),
    CONVOLUTIONS: (torch.backends.cudnn, torch.backends),
    CPU.matmul: (torch.backends,),
    CPU.conv: (torch.backends,),
}

_VOLTA = (7, 0), "float16 tensor cores (Volta or later)"
TIERS = {
    "fp32": Tier(),
    "exact": Tier(torch.float32, *_VOLTA, accelerated=True),
    "tf32": Tier(capability=(8, 0), hardware="TF32 (Ampere or later)"),
    "fp16": Tier(torch.float16, *_VOLTA, accelerated=True),
    "bf16": Tier(torch.bfloat16, (8, 0), "bfloat16 (Ampere or later)", accelerated=True),
}


def supports(tier: str, device: torch.device) -> bool:
    """Return whether `device` has the units for `tier`. Every device runs fp32."""
    required = TIERS[tier].capability
    if device.type != "cuda":
        return required == (0, 0)
    from accel.kernels.gpu import capability  # a CPU has none

    return capability(device) >= required


def default_tier(device: torch.device) -> str:
    """Return fp16 for a device with tensor cores, else fp32."""
    return "fp16" if supports("fp16", device) else "fp32"


def require(name: str, tier: str, device: torch.device) -> None:
    """Raise UsageError about the parameter `name` if `device` lacks a tier: nothing falls
    back in silence.
    """
    if tier not in TIERS:
        raise about(name, tier)(f"choose from {', '.join(TIERS)}")
    if not supports(tier, device):
        raise about(name, tier)(f"{device} has no {TIERS[tier].hardware}", "choose fp32")


@contextmanager
def arithmetic(tier: str) -> Iterator[None]:
    """Run the block with torch's process-wide switches of `tier`, and restore them. Blocks may lie
    inside one another: the innermost holds.
    """
    with preserve_switches():
        for switch in SWITCHES:
            switch.fp32_precision = "ieee"
        if tier == "tf32":
            GEMMS.fp32_precision = "tf32"
        # Only the decoder convolves. Beside half precision TF32 loses nothing there, and
        # unlike float16 it cannot overflow.
        if tier not in ("fp32", "exact"):
            CONVOLUTIONS.fp32_precision = "tf32"
        yield


def float32_decoder(tier: str, device: torch.device) -> str:
    """Return the decoder's float32 arithmetic in a run of `tier`: TF32 convolutions if
    the tier allows them.
    """
    return "tf32" if tier not in ("fp32", "exact") and supports("tf32", device) else "fp32"


def decoder_precision(wanted: str, tier: str, device: torch.device) -> str:
    """Return the decoder's arithmetic: `wanted`, or for "auto" fp16 in half tiers and
    float32 in others. Raises UsageError if the hardware lacks it.
    """
    if wanted == "auto":
        half = TIERS[tier].dtype != torch.float32 and supports("fp16", device)
        return "fp16" if half else float32_decoder(tier, device)
    require("vae_precision", wanted, device)
    return wanted


@contextmanager
def preserve_switches() -> Iterator[None]:
    """Restore the process-wide switches after the block."""
    before = [(switch, _value(switch, *wider)) for switch, wider in SWITCHES.items()]
    try:
        yield
    finally:
        for switch, value in before:
            switch.fp32_precision = value


def _value(switch, wider=None, *others):
    """Return the value that a switch has itself, "none" if it follows `wider`. torch shows
    the value that is followed: change that for a moment, and see whether this one changes.
    """
    shown = switch.fp32_precision
    if shown == "none" or wider is None or wider.fp32_precision != shown:
        return shown
    before = _value(wider, *others)
    wider.fp32_precision = "tf32" if shown == "ieee" else "ieee"
    follows = switch.fp32_precision != shown
    wider.fp32_precision = before
    return "none" if follows else shown


@contextmanager
def convolutions(name: str) -> Iterator[None]:
    """Run the block in the decoder's float32. name: tf32, or fp32, without TF32 anywhere."""
    with preserve_switches() if name == "tf32" else true_float32():
        CONVOLUTIONS.fp32_precision = "tf32" if name == "tf32" else "ieee"
        yield


@contextmanager
def true_float32() -> Iterator[None]:
    """Run the block without TF32 in GEMMs, in every tier: half precision keeps its few
    float32 GEMMs exact.
    """
    with preserve_switches():
        GEMMS.fp32_precision = "ieee"
        yield
