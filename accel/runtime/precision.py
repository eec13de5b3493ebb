"""Precision tiers: the arithmetic of a run, torch's backend switches for it, and isolation from
the caller's settings.

Their help texts are in accel/config/options.py.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from accel.errors import UsageError
from accel.kernels import gpu


class Tier(NamedTuple):
    """A tier's dtype and hardware."""

    dtype: torch.dtype = torch.float32  # of GEMMs' operands and results
    capability: tuple[int, int] = (0, 0)  # minimum compute capability; (0, 0): any device
    hardware: str = ""
    accelerated: bool = False  # uses accel/fast instead of the reference network
    splits_tokens: bool = True  # whether ranks can divide the tokens of a row


# torch's switches for float32 arithmetic, with the wider switches that each follows if its value is
# "none". This module does not use `allow_tf32`: setting it also sets these switches, but not the
# reverse, and torch raises an error if they differ.
GEMMS: Any = torch.backends.cuda.matmul
CONVOLUTIONS: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
CPU: Any = torch.backends.mkldnn
SWITCHES: dict[Any, tuple] = {
    GEMMS: (torch.backends.cudnn, torch.backends),
    CONVOLUTIONS: (torch.backends.cudnn, torch.backends),
    CPU.matmul: (torch.backends,),
    CPU.conv: (torch.backends,),
}

IEEE_TIERS = ("fp32", "fp32-fused", "exact")  # no TF32, in the decoder either
_VOLTA = (7, 0), "float16 tensor cores (Volta or later)"
TIERS = {
    "fp32": Tier(),
    "fp32-fused": Tier(torch.float32, (7, 0), "fused kernels (Volta or later)", accelerated=True),
    "exact": Tier(torch.float32, *_VOLTA, accelerated=True, splits_tokens=False),
    "tf32": Tier(capability=(8, 0), hardware="TF32 (Ampere or later)"),
    "fp16": Tier(torch.float16, *_VOLTA, accelerated=True),
    "bf16": Tier(torch.bfloat16, (8, 0), "bfloat16 (Ampere or later)", accelerated=True),
}


def supports(tier: str, device: torch.device) -> bool:
    """Return whether `device` supports `tier`. Every device supports fp32."""
    required = TIERS[tier].capability
    if device.type != "cuda":
        return required == (0, 0)
    return gpu.capability(device) >= required


def default_tier(device: torch.device) -> str:
    """Return fp16 for a device with tensor cores, else fp32."""
    return "fp16" if supports("fp16", device) else "fp32"


def require(name: str, tier: str, device: torch.device) -> None:
    """Raise UsageError about the parameter `name` if `device` does not support a tier."""
    if tier not in TIERS:
        raise UsageError(f"choose from {', '.join(TIERS)}", parameter=name, value=tier)
    if not supports(tier, device):
        problem = f"{device} has no {TIERS[tier].hardware}"
        if gpu.is_amd(device):
            problem = f"{device} is an AMD GPU, and this tier is for NVIDIA GPUs"
        raise UsageError(problem, "choose fp32", parameter=name, value=tier)


@contextmanager
def arithmetic(tier: str) -> Iterator[None]:
    """Run the with-block with torch's process-wide switches for `tier`, and restore them after it.

    Nested blocks are allowed.
    """
    with preserve_switches():
        for switch in SWITCHES:
            switch.fp32_precision = "ieee"
        if tier == "tf32":
            GEMMS.fp32_precision = "tf32"
        # Only decoders have convolutions. In half tiers, TF32 does not reduce their accuracy, and
        # unlike float16 it cannot overflow.
        if tier not in IEEE_TIERS:
            CONVOLUTIONS.fp32_precision = "tf32"
        yield


def float32_decoder(tier: str, device: torch.device) -> str:
    """Return "tf32" if `tier` allows TF32 convolutions in the decoder, else "fp32"."""
    return "tf32" if tier not in IEEE_TIERS and supports("tf32", device) else "fp32"


def decoder_precision(wanted: str, tier: str, device: torch.device) -> str:
    """Return the decoder's arithmetic: `wanted`, or for "auto" fp16 in half tiers, else float32.

    Raises UsageError if the hardware does not support `wanted`.
    """
    if wanted == "auto":
        half = TIERS[tier].dtype != torch.float32 and supports("fp16", device)
        return "fp16" if half else float32_decoder(tier, device)
    require("vae_precision", wanted, device)
    return wanted


@contextmanager
def preserve_switches() -> Iterator[None]:
    """Restore the process-wide switches after the with-block."""
    before = [(switch, _value(switch, *wider)) for switch, wider in SWITCHES.items()]
    try:
        yield
    finally:
        for switch, value in before:
            switch.fp32_precision = value


def _value(switch, wider=None, *others):
    """Return the value of a switch, "none" if it follows `wider`.

    torch returns the effective value. To find out whether the switch follows `wider`, change
    `wider` temporarily.
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
    """Run the with-block in the decoder's float32 arithmetic.

    name: "tf32" for TF32 in convolutions, "fp32" for no TF32.
    """
    with preserve_switches():
        if name != "tf32":
            GEMMS.fp32_precision = "ieee"
        CONVOLUTIONS.fp32_precision = "tf32" if name == "tf32" else "ieee"
        yield


@contextmanager
def true_float32() -> Iterator[None]:
    """Run the with-block without TF32 in GEMMs, in every tier.

    The few float32 GEMMs of half tiers need it.
    """
    with preserve_switches():
        GEMMS.fp32_precision = "ieee"
        yield


# ---- Isolation of library calls ----

# Backend switches, default dtype and CUDA graph capture are process-wide.
_LOCK = threading.RLock()


@contextmanager
def exclusive() -> Iterator[None]:
    """Run the with-block in one thread at a time, with default torch settings.

    Autocast, inference mode, gradients, default dtype and default device of the caller have no
    effect in the block. The backend switches are restored after it.
    """
    with (
        _LOCK,
        preserve_switches(),
        torch.inference_mode(False),
        torch.no_grad(),
        ExitStack() as stack,
    ):
        for device_type in filter(torch.is_autocast_enabled, ("cpu", "cuda", "mps")):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        yield
