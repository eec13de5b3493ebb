"""Precision tiers: which arithmetic a run uses, and the backend switches that make it so."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple

import torch

from accel.errors import UsageError
from accel.gpu import capability


class Tier(NamedTuple):
    """What a tier computes in, and what it needs."""

    meaning: str
    dtype: torch.dtype = torch.float32  # of the GEMMs' operands and results
    capability: tuple[int, int] = (0, 0)  # the least compute capability; (0, 0): any device
    hardware: str = ""
    accelerated: bool = False  # runs as a network of accel/fast; the others run the reference model


_TENSOR_CORES = dict(capability=(7, 0), hardware="float16 tensor cores (Volta or later)", accelerated=True)
TIERS = {
    "fp32": Tier("true float32, TF32 off"),
    "exact": Tier("float32 accuracy on float16 tensor cores: split-fp16 GEMMs, all else float32", **_TENSOR_CORES),
    "tf32": Tier("float32 with TF32 GEMMs", capability=(8, 0), hardware="TF32 (Ampere or later)"),
    "fp16": Tier(
        "float16 GEMMs; residual stream, norms, softmax statistics, final layer and sampler in float32",
        dtype=torch.float16,
        **_TENSOR_CORES,
    ),
    "bf16": Tier(
        "as fp16 with bfloat16 GEMMs: for weights that overflow float16",
        dtype=torch.bfloat16,
        capability=(8, 0),
        hardware="bfloat16 (Ampere or later)",
        accelerated=True,
    ),
}


def supports(tier: str, device: torch.device) -> bool:
    """Whether `device` has the units for `tier`. Everything runs fp32."""
    return capability(device) >= TIERS[tier].capability


def default_tier(device: torch.device) -> str:
    """fp16 where there are tensor cores, else fp32."""
    return "fp16" if supports("fp16", device) else "fp32"


def require(name: str, tier: str, device: torch.device) -> None:
    """Raise UsageError about the parameter `name` for a tier that `device` lacks: nothing falls back in silence."""
    if tier not in TIERS:
        raise UsageError(f"`{name}={tier}`: choose from {', '.join(TIERS)}")
    if not supports(tier, device):
        raise UsageError(f"`{name}={tier}`: {device} has no {TIERS[tier].hardware}; choose fp32")


def apply_precision(tier: str, device: torch.device) -> None:
    """Set the process-wide switches of `tier`. Raises UsageError where the hardware lacks it."""
    require("precision", tier, device)
    torch.backends.cuda.matmul.allow_tf32 = tier == "tf32"
    # Only the decoder convolves. Beside half precision TF32 loses nothing there, and unlike float16 it cannot overflow.
    torch.backends.cudnn.allow_tf32 = tier not in ("fp32", "exact")


def float32_decoder(tier: str, device: torch.device) -> str:
    """The decoder's arithmetic in float32 beside `tier`: TF32 convolutions where the tier allows them."""
    return "tf32" if tier not in ("fp32", "exact") and supports("tf32", device) else "fp32"


def decoder_precision(wanted: str, tier: str, device: torch.device) -> str:
    """The decoder's arithmetic: `wanted`, or for "auto" fp16 beside the half tiers and float32 beside the others.

    Raises UsageError where the hardware lacks it.
    """
    if wanted == "auto":
        half = TIERS[tier].dtype != torch.float32 and supports("fp16", device)
        return "fp16" if half else float32_decoder(tier, device)
    require("vae_precision", wanted, device)
    return wanted


_ALONE = threading.RLock()  # the switches, and the capture of a CUDA graph, are the process's


@contextmanager
def alone() -> Iterator[None]:
    """One thread of the process at a time is inside, and no setting of the caller's reaches there: no autocast, no
    inference mode, no gradients, no default dtype or device. The backend switches are afterwards what they were."""
    default = torch.get_default_dtype()
    with _ALONE, switches_kept(), torch.inference_mode(False), torch.no_grad(), ExitStack() as stack:
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda", "mps")):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        stack.callback(torch.set_default_dtype, default)
        yield


@contextmanager
def switches_kept() -> Iterator[None]:
    """The process-wide switches are after the block what they were before it."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@contextmanager
def convolutions(name: str) -> Iterator[None]:
    """The decoder's float32 inside: `name` is tf32, or fp32 without TF32 anywhere."""
    with switches_kept():
        torch.backends.cudnn.allow_tf32 = name == "tf32"
        if name != "tf32":
            torch.backends.cuda.matmul.allow_tf32 = False
        yield


@contextmanager
def float32_gemms(tf32: bool) -> Iterator[None]:
    """Float32 GEMMs inside, and whether they may use TF32."""
    with switches_kept():
        torch.backends.cuda.matmul.allow_tf32 = tf32
        yield


def true_float32() -> AbstractContextManager[None]:
    """Float32 GEMMs without TF32 inside, whatever the tier: half precision keeps its few float32 GEMMs exact."""
    return float32_gemms(tf32=False)
