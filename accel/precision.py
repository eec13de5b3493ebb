"""Precision tiers: which arithmetic a run uses, and the backend switches that make it so."""

from contextlib import contextmanager

import torch

TIERS = {
    "fp32": "true float32, TF32 off",
    "tf32": "float32 with TF32 products on tensor cores",
}


def has_tf32(device):
    """TF32 came with Ampere (compute capability 8.0)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def default_tier(device):
    """What DiT does on this device: TF32 where the hardware has it."""
    return "tf32" if has_tf32(device) else "fp32"


def apply_precision(tier, device):
    """Set the process-wide switches of `tier`. Raises ValueError where the hardware lacks it: nothing falls back in silence."""
    if tier not in TIERS:
        raise ValueError(f"--precision {tier}: choose from {', '.join(TIERS)}")
    if tier == "tf32" and not has_tf32(device):
        raise ValueError(f"--precision tf32: {device} has no TF32 (Ampere or later); choose fp32")
    torch.backends.cuda.matmul.allow_tf32 = tier == "tf32"
    torch.backends.cudnn.allow_tf32 = tier == "tf32"


@contextmanager
def true_float32():
    """Float32 products without TF32 inside, whatever the tier: half precision keeps its few wide products exact."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
