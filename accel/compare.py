"""Compare a network with the module that it was made from: finite values, the same
function, the same guidance.
"""

import copy
import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.errors import UsageError
from accel.families.loaded_module import LoadedModule
from accel.network import Batch, BlockNetwork, Plain
from accel.overflow import overflows, remedy
from accel.precision import TIERS

# Relative error of an evaluation beyond which it is another function's, by tier and by
# the module's own dtype.
TOLERANCE = {"fp32": 1e-4, "exact": 1e-4, "tf32": 1e-2, "fp16": 1e-2, "bf16": 5e-2}
ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 5e-2}


class OwnGuidance(NamedTuple):
    """The guidance that a module's forward_with_cfg computes.

    channels: how many it guides by uncond + scale·(cond − uncond), from the first on; None if
    there is no such method, or if it guides otherwise. is_other: whether it guides otherwise.
    """

    channels: int | None = None
    is_other: bool = False


def build(
    state: dict[str, Tensor],
    loaded: LoadedModule,
    tier: str,
    device: torch.device,
    tuner: Any = None,
) -> BlockNetwork:
    """Return the network of a tier: the reference network for fp32 and tf32, an
    accelerated one otherwise. loaded: the module of which it is. The weights `state`,
    under the reference network's names, are copied.
    """
    if TIERS[tier].accelerated:
        from accel import fast  # brings Triton; the other tiers need not wait for it

        return fast.build(state, loaded.model, loaded.fit.family.pack, tier, device, tuner)
    model = copy.deepcopy(loaded.model)
    state = {name: value.to(device, torch.float32, copy=True) for name, value in state.items()}
    model.load_state_dict(state, strict=True, assign=True)
    return Plain(model.eval().requires_grad_(False))


def _inputs(loaded, device, t=None):
    """Return x, t, y: the same on every device. Of a model with a null class these are two batch
    rows, of the same noise, one with a class and one with the null class; else one row.
    """
    t = loaded.fit.family.some_times[0] if t is None else t
    generator = torch.Generator().manual_seed(0)
    side = loaded.fit.latent_size
    x = torch.randn(1, loaded.model.in_channels, side, side, generator=generator)
    y = torch.randint(loaded.fit.num_classes, (1,), generator=generator)
    if loaded.fit.null_class:
        x = torch.cat([x, x])
        y = torch.cat([y, torch.full_like(y, loaded.fit.num_classes)])
    return x.to(device), torch.full((len(y),), t, device=device), y.to(device)


def require_finite(network: BlockNetwork, loaded: LoadedModule, tier: str) -> None:
    """Raise UsageError if the weights or the network's values leave the range of an
    accelerated tier.
    """
    device = next(network.parameters()).device
    batch = Batch([(1, 1)], loaded.fit.latent_size, loaded.fit.num_classes)
    if TIERS[tier].accelerated and overflows(network, batch, device, loaded.fit.family.some_times):
        raise UsageError(
            f"`precision={tier}`: overflows on these weights; {remedy(network, tier, device)}"
        )


def require_same(
    network: BlockNetwork,
    loaded: LoadedModule,
    tier: str,
    times: Sequence[float] | None = None,
) -> None:
    """Raise UsageError unless `network` and the module have the same output on noise, with a
    class and with the null class, at `times`; default: some of its family. A module whose
    output is zero, such as an untrained one, is compared with noise in place of its zero weights.
    """
    device = next(network.parameters()).device
    times = loaded.fit.family.some_times if times is None else times
    outputs = [_evaluate(loaded, t=t) for t in times]
    if not outputs[0].any():
        weights = _not_zero(loaded)
        tier = "fp32"
        network = build(loaded.read(weights), loaded, tier, device)
        outputs = [_evaluate(loaded, weights, t) for t in times]
    tolerance = max(TOLERANCE[tier], ROUNDING.get(next(loaded.module.parameters()).dtype, 0))
    for t, want in zip(times, outputs):
        got = network.forward(*_inputs(loaded, device, t))
        if want.shape != got.shape:
            shapes = f"returns {tuple(want.shape)}, a DiT with these weights {tuple(got.shape)}"
            raise UsageError(f"{loaded.name}: {shapes}: another network")
        if not want.isfinite().all():
            raise UsageError(f"{loaded.name}: its own output is not finite; check the weights")
        errors = (got.to(want) - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
        error = float(errors.amax())  # of either row
        if not error <= tolerance:
            raise UsageError(
                f"{loaded.name}: computes another function than a DiT with these weights: "
                f"relative error {error:.1g} at t = {t:g}, {tolerance:g} is allowed; check=False "
                "skips this check"
            )


def own_guidance(loaded: LoadedModule) -> OwnGuidance:
    """Return the guidance of the module's forward_with_cfg. Its output is compared with that of
    forward, at two times and scales.
    """
    if (
        not hasattr(loaded.module, "forward_with_cfg")
        or loaded.rules.face
        or not loaded.fit.null_class
    ):
        return OwnGuidance()
    counts = set()
    weights = None if _evaluate(loaded).any() else _not_zero(loaded)
    for t, scale in zip(loaded.fit.family.some_times, (1.7, 3.1)):
        plain = _evaluate(loaded, weights, t, "forward")
        its_own = _evaluate(loaded, weights, t, "forward_with_cfg", scale)
        cond, uncond = plain.chunk(2)
        whole = uncond + scale * (cond - uncond)
        # TF32, where the caller allows it, may round differently in each call.
        tolerance = float(whole.abs().amax()) * max(
            1e-2, ROUNDING.get(next(loaded.module.parameters()).dtype, 0)
        )

        def error(channels):
            want = torch.cat([torch.cat([whole[:, :channels]] * 2), plain[:, channels:]], 1)
            return float((its_own - want).abs().amax()) if its_own.shape == want.shape else math.inf

        # Where guidance changes nothing, every number fits: take the family's.
        usual = loaded.fit.family.recipe.guidance_channels
        likely = min(
            range(1, loaded.fit.out_channels + 1), key=lambda n: (error(n), abs(n - usual))
        )
        if not error(likely) <= tolerance:  # NaN too
            return OwnGuidance(is_other=True)
        counts.add(likely)
    if len(counts) > 1:
        return OwnGuidance(is_other=True)
    return OwnGuidance(counts.pop())


def _not_zero(loaded):
    """Return the module's weights, with noise in place of tensors that are zero."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: value
        if value.any()
        else torch.randn(value.shape, generator=generator).mul(0.1).to(value)
        for name, value in loaded.module.state_dict().items()
    }


def _evaluate(loaded, weights=None, t=None, method="__call__", *more):
    """Evaluate a method of the module on noise, in evaluation mode, as it is written: compiled
    parts are not compiled for this. weights: in place of its own; more: arguments of the method
    after x, t, y. The module, its mode and the random state are left as they were.
    """
    first = next(loaded.module.parameters())
    training = [part for part in loaded.module.modules() if part.training]
    x, t, y = _inputs(loaded, first.device, t)
    x = x.double() if first.dtype == torch.float64 else x
    gpus = [first.device] if first.is_cuda else []
    half = first.dtype in ROUNDING
    with (
        _not_compiled(),
        torch.random.fork_rng(gpus),
        torch.autocast(first.device.type, first.dtype if half else None, enabled=half),
    ):
        try:
            for part in training:
                part.training = False
            return loaded.evaluate(x, t, y, weights, method, *more).detach()
        except Exception as error:  # of code that is not ours
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
            raise UsageError(
                f"{loaded.name}: cannot be evaluated as a DiT ({reason}); check=False skips this"
            ) from None
        finally:
            for part in training:
                part.training = True


def _not_compiled():
    """Return a context in which modules and functions that torch compiles run as they are written.

    Where torch's compiler is not loaded, which takes seconds, nothing is compiled.
    """
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance("force_eager")
    return nullcontext()
