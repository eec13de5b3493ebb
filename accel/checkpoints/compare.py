"""Compare a caller's module with its copy on noise."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from accel.checkpoints import Checkpoint
from accel.checkpoints.module import unwrapped
from accel.families.spec import CallAdapter
from accel.runtime.network import BlockNetwork
from accel.runtime.precision import arithmetic
from accel.sampling.guidance import guided_halves

# The largest allowed relative error of a copy, by tier and by the module's dtype.
TOLERANCE = {
    "fp32": 3e-5,
    "fp32-fused": 3e-5,
    "exact": 1e-4,
    "tf32": 1e-2,
    "fp16": 1e-2,
    "bf16": 5e-2,
}
ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
# The same for forward_with_cfg: of a float32 module, and of a half-precision one.
GUIDANCE_TOLERANCE = 1e-3, 1e-2
SCALE = 1.7


def require_same(
    network: BlockNetwork,
    checkpoint: Checkpoint,
    adapter: CallAdapter,
    tier: str,
    guidance_channels: int | None = None,
) -> None:
    """Check that the caller's module and its copy agree on noise.

    Both evaluate two batch rows: a class and the null class, at two times. If the module has
    forward_with_cfg, it must guide the first `guidance_channels` channels; None skips this check.

    network: the copy in precision `tier`, for latents of the trained size. Raises UsageError if the
    outputs differ. Prints a notice if all outputs are zero.
    """
    spec = checkpoint.spec
    error_of = checkpoint.given.error
    module = unwrapped(adapter.module)
    narrow = ROUNDING.get(next(module.parameters()).dtype, 0)
    generator = torch.Generator().manual_seed(0)
    shape = 2, spec.in_channels, spec.trained_side, spec.trained_side
    x = torch.randn(*shape, generator=generator)
    t = torch.tensor((377, 999) if spec.family.prediction == "noise" else (0.377, 0.9))
    y = torch.randint(spec.num_classes, (2,), generator=generator)
    if spec.null_class:
        y[1] = spec.num_classes
    want = _evaluate(checkpoint, adapter, adapter.module, x, t, y)
    if not want.any():
        checkpoint.given.warn("returns zeros, as if it were not trained: nothing was compared")
        return
    device = next(network.parameters()).device
    with arithmetic(tier):
        got = network.forward(x.to(device), t.to(device), y.to(device)).to(want.device)
    if want.shape != got.shape:
        raise error_of(
            f"returns {tuple(want.shape)}, and a {spec.family.name} with these weights "
            f"{tuple(got.shape)}: another network"
        )
    if not want.isfinite().all():
        raise error_of("its own output is not finite", "check the weights")
    most = max(TOLERANCE[tier], narrow)
    error = _error(got, want)
    if not error <= most:
        raise error_of(
            f"computes another function than a {spec.family.name} with these weights: relative "
            f"error {error:.1g}, {most:g} is allowed",
            "check=False skips this check",
        )
    method = getattr(module, "forward_with_cfg", None)
    if guidance_channels is None or method is None or not spec.null_class:
        return
    x = torch.cat([x[:1], x[:1]])
    t = t[:1].repeat(2)
    plain = _evaluate(checkpoint, adapter, module, x, t, y)
    guided = _evaluate(checkpoint, adapter, method, x, t, y, SCALE)
    want = guided_halves(plain, SCALE, guidance_channels)
    every = "N" if guidance_channels == spec.in_channels else spec.in_channels
    if guided.shape != want.shape or not _error(guided, want) <= GUIDANCE_TOLERANCE[narrow > 0]:
        raise error_of(
            f"its forward_with_cfg does not guide {guidance_channels} channels by "
            "uncond + scale·(cond − uncond)",
            f"give `guidance_channels={every}` if it guides {every}; check=False skips this check",
        )


def _error(got: Tensor, want: Tensor) -> float:
    """Return the largest relative error of a batch row."""
    errors = (got - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
    return float(errors.amax())


def _evaluate(
    checkpoint: Checkpoint,
    adapter: CallAdapter,
    function: Callable[..., Any],
    x: Tensor,
    t: Tensor,
    y: Tensor,
    *scale: float,
) -> Tensor:
    """Evaluate the module or its method in eval mode and in its own dtype, without TF32 and
    torch.compile. Return the network's output in float32. Restore training mode and random state.
    """
    first = next(adapter.module.parameters())
    device = first.device
    training = [part for part in adapter.module.modules() if part.training]
    inputs, named = adapter.inputs(x.to(device, first.dtype), t.to(device), y.to(device))
    half = first.dtype in ROUNDING
    # Without torch's compiler, whose import takes seconds, nothing was compiled.
    imported = "torch._dynamo" in sys.modules
    with (
        torch.compiler.set_stance("force_eager") if imported else nullcontext(),
        arithmetic("fp32"),
        torch.random.fork_rng([device] if first.is_cuda else []),
        torch.autocast(device.type, first.dtype if half else None, enabled=half),
    ):
        try:
            for part in training:
                part.training = False
            return adapter.output(function(*inputs, *scale, **named)).detach().float()
        except Exception as error:  # the module's code can raise anything
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
            raise checkpoint.given.error(
                f"cannot be evaluated as a {checkpoint.spec.family.name} ({reason})",
                "check=False skips this",
            ) from None
        finally:
            for part in training:
                part.training = True
