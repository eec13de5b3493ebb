"""Precision tiers: which arithmetic a run uses, and the backend switches that make it so."""

from contextlib import contextmanager

import torch

TIERS = {
    "fp32": "true float32, TF32 off",
    "exact": "float32 accuracy on float16 tensor cores: each operand of a product is two float16 terms; all else in float32",
    "tf32": "float32 with TF32 products on tensor cores",
    "fp16": "float16 products, float32 accumulation; residual stream, norms, softmax statistics, final layer and sampler in float32",
    "bf16": "the same with bfloat16 products: for weights that overflow float16",
}
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
FAST = {**HALF, "exact": "terms"}  # tiers of accel.fast.FastDiT, and what its products take
_NEEDS = {
    "exact": ((7, 0), "float16 tensor cores (Volta or later)"),
    "tf32": ((8, 0), "TF32 (Ampere or later)"),
    "fp16": ((7, 0), "float16 tensor cores (Volta or later)"),
    "bf16": ((8, 0), "bfloat16 (Ampere or later)"),
}


def supports(tier, device):
    """Whether `device` has the units for `tier`. Everything runs fp32."""
    return tier not in _NEEDS or device.type == "cuda" and torch.cuda.get_device_capability(device) >= _NEEDS[tier][0]


def default_tier(device):
    """fp16 where there are tensor cores, else fp32."""
    return "fp16" if supports("fp16", device) else "fp32"


def float32_decoder(tier, device):
    """The decoder's arithmetic in float32 beside `tier`: TF32 convolutions where the tier has them."""
    return "tf32" if tier not in ("fp32", "exact") and supports("tf32", device) else "fp32"


def decoder_precision(wanted, tier, device):
    """What the decoder is to run in: `wanted`, or for "auto" fp16 beside the half tiers, else float32. Raises ValueError where the hardware lacks it."""
    if wanted == "auto":
        return "fp16" if tier in HALF and supports("fp16", device) else float32_decoder(tier, device)
    if not supports(wanted, device):
        raise ValueError(f"--vae-precision {wanted}: {device} has no {_NEEDS[wanted][1]}; choose fp32")
    return wanted


def apply_precision(tier, device):
    """Set the process-wide switches of `tier`. Raises ValueError where the hardware lacks it: nothing falls back in silence."""
    if tier not in TIERS:
        raise ValueError(f"--precision {tier}: choose from {', '.join(TIERS)}")
    if not supports(tier, device):
        raise ValueError(f"--precision {tier}: {device} has no {_NEEDS[tier][1]}; choose fp32")
    torch.backends.cuda.matmul.allow_tf32 = tier == "tf32"
    # Convolutions are the decoder's: this is its float32 form. Beside half precision TF32 is no loss there, and unlike float16 it cannot overflow.
    torch.backends.cudnn.allow_tf32 = tier not in ("fp32", "exact")


@contextmanager
def convolutions(name):
    """The decoder's float32 form inside: `name` tf32, or fp32 without TF32 anywhere."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = (
        name == "tf32",
        name == "tf32" and before[1],
    )
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@contextmanager
def true_float32():
    """Float32 products without TF32 inside, whatever the tier: half precision keeps its few wide products exact."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
