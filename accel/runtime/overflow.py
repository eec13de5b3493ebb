"""Detect values that a tier's number format cannot represent."""

from collections.abc import Sequence

import torch

from accel.errors import UsageError
from accel.runtime.network import Batch, Network
from accel.runtime.precision import TIERS, supports


@torch.inference_mode()
def overflows(network: Network, batch: Batch, device: torch.device, times: Sequence[float]) -> bool:
    """Return whether `network` returns infinities or NaN for noise at `times`."""
    # A separate generator, so that the run's random stream does not change.
    generator = torch.Generator(device).manual_seed(0)
    n, copies = batch.rows[0]
    x = torch.randn(
        n,
        network.in_channels,
        batch.side,
        batch.side,
        generator=generator,
        device=device,
    )
    y = torch.arange(n, device=device) % batch.num_classes
    null_labels = y.new_full((n * (copies - 1),), batch.num_classes)
    y = torch.cat([y, null_labels])
    # Use the run's shapes, because other shapes would be compiled and tuned only for this check.
    outputs = (network.forward(x, torch.full(y.shape, t, device=device), y) for t in times)
    return not all(out.isfinite().all() for out in outputs)


def require_finite(
    network: Network, tier: str, batch: Batch, device: torch.device, times: Sequence[float]
) -> None:
    """Raise UsageError if an accelerated network overflows its tier's number format."""
    if TIERS[tier].accelerated and overflows(network, batch, device, times):
        raise UsageError(
            "overflows on these weights",
            remedy(network, tier, device),
            parameter="precision",
            value=tier,
        )


def remedy(network: Network, tier: str, device: torch.device) -> str:
    """Return the remedy for a tier that overflows, as text."""
    layer = network.overflowed()
    if layer:
        return f"{layer} gives values beyond a high/low split; use `precision=fp32`"
    if tier == "fp16" and supports("bf16", device):
        return "use `precision=bf16`"
    return f"check {network.weights_label}" if tier == "fp32" else "use `precision=fp32`"
