"""Build a network of a module that the caller holds, and compare both: the same function, the
same guidance.
"""

import sys
from contextlib import nullcontext

import torch
from torch import nn
from torch.func import functional_call

from accel.errors import UsageError
from accel.families.loaded_module import LoadedModule, read_state
from accel.families.recognise import Fit, reference_state
from accel.network import BlockNetwork, Plain
from accel.precision import TIERS
from accel.sampling.guidance import guided_halves
from accel.weights import Weights

# Relative error of an evaluation beyond which it is another function's, by tier and by
# the module's own dtype.
TOLERANCE = {"fp32": 1e-4, "exact": 1e-4, "tf32": 1e-2, "fp16": 1e-2, "bf16": 5e-2}
ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 5e-2}


def build(weights: Weights, fit: Fit, tier: str, device: torch.device) -> BlockNetwork:
    """Return the network of a tier for latents of the trained size: the reference network for
    fp32 and tf32, an accelerated one otherwise. The weights are copied.
    """
    state = reference_state(weights, fit)
    model = fit.empty(fit.latent_size)
    if TIERS[tier].accelerated:
        from accel import fast  # brings Triton; the other tiers need not wait for it

        return fast.build(state, model, fit.family.pack, tier, device)
    state = {name: value.to(device, torch.float32, copy=True) for name, value in state.items()}
    model.load_state_dict(state, strict=True, assign=True)
    return Plain(model.eval().requires_grad_(False))


def _inputs(fit, device, t):
    """Return x, t, y: the same on every device. Of a model with a null class these are two batch
    rows, of the same noise, one with a class and one with the null class; else one row.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, fit.in_channels, fit.latent_size, fit.latent_size, generator=generator)
    y = torch.randint(fit.num_classes, (1,), generator=generator)
    if fit.null_class:
        x = torch.cat([x, x])
        y = torch.cat([y, torch.full_like(y, fit.num_classes)])
    return x.to(device), torch.full((len(y),), t, device=device), y.to(device)


def require_same(network: BlockNetwork, loaded: LoadedModule, tier: str, side: int) -> None:
    """Raise UsageError unless `network`, for latents of this side, and the module have the same
    output on noise, with a class and with the null class, at some times. For latents of another
    side than the module's, a network of the module's own is compared. A module whose output is
    zero, such as an untrained one, is compared with noise in place of its zero weights.
    """
    device = next(network.parameters()).device
    fit = loaded.fit
    if fit.latent_size != side:
        network = build(loaded, fit, tier, device)
    outputs = [_evaluate(loaded, t) for t in fit.family.some_times]
    if not outputs[0].any():
        weights = _not_zero(loaded)
        tier = "fp32"
        state = read_state(loaded.name, weights, loaded, fit, fit.latent_size)
        network = build(state, fit, tier, device)
        outputs = [_evaluate(loaded, t, weights) for t in fit.family.some_times]
    tolerance = max(TOLERANCE[tier], _rounding(loaded))
    for t, want in zip(fit.family.some_times, outputs):
        got = network.forward(*_inputs(fit, device, t))
        if want.shape != got.shape:
            raise UsageError(
                f"{loaded.name}: returns {tuple(want.shape)}, and a {fit.family.name} with these "
                f"weights {tuple(got.shape)}: another network"
            )
        if not want.isfinite().all():
            raise UsageError(f"{loaded.name}: its own output is not finite; check the weights")
        errors = (got.to(want) - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
        error = float(errors.amax())  # of either row
        if not error <= tolerance:
            raise UsageError(
                f"{loaded.name}: computes another function than a {fit.family.name} with these "
                f"weights: relative error {error:.1g} at t = {t:g}, {tolerance:g} is allowed; "
                "check=False skips this check"
            )


def own_guidance(loaded: LoadedModule) -> int | None:
    """Return how many channels, from the first on, the module's forward_with_cfg guides by
    uncond + scale·(cond − uncond); 0 if it guides otherwise, None if there is no such method.

    Its output is compared with that of forward, at two times and scales.
    """
    fit = loaded.fit
    has_method = hasattr(loaded.module, "forward_with_cfg") and not loaded.rules.face
    if not has_method or not fit.null_class:
        return None
    weights = None if _evaluate(loaded, fit.family.some_times[0]).any() else _not_zero(loaded)
    outputs = []
    for t, scale in zip(fit.family.some_times, (1.7, 3.1)):
        plain = _evaluate(loaded, t, weights, "forward").float()
        its_own = _evaluate(loaded, t, weights, "forward_with_cfg", scale).float()
        if its_own.shape != plain.shape:
            return 0
        largest = guided_halves(plain, scale, fit.out_channels).abs().amax().clamp(min=1e-9)
        outputs.append((scale, plain, its_own, largest))

    def error(channels):
        """Return the largest error of this number, relative to guidance of all channels."""
        errors = [
            (its_own - guided_halves(plain, scale, channels)).abs().amax() / largest
            for scale, plain, its_own, largest in outputs
        ]
        return float(torch.stack(errors).amax())  # NaN if there is one

    # Where guidance changes nothing, every number fits: take the family's.
    usual = fit.defaults.guidance_channels
    numbers = range(1, fit.out_channels + 1)
    likely = min(numbers, key=lambda n: (error(n), abs(n - usual)))
    # TF32, where the caller allows it, may round differently in each call.
    return likely if error(likely) <= max(1e-2, _rounding(loaded)) else 0


def _rounding(loaded):
    """Return the relative error that the dtype of the module's weights explains."""
    return ROUNDING.get(next(loaded.module.parameters()).dtype, 0)


def _not_zero(loaded):
    """Return the module's weights, with noise in place of tensors that are zero."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: value
        if value.any()
        else torch.randn(value.shape, generator=generator).mul(0.1).to(value)
        for name, value in loaded.module.state_dict().items()
    }


def _evaluate(loaded, t, weights=None, method="__call__", *more):
    """Evaluate a method of the module on noise, in evaluation mode, as it is written: compiled
    parts are not compiled for this. weights: in place of its own; more: arguments of the method
    after x, t, y. The module, its mode and the random state are left as they were.
    """
    first = next(loaded.module.parameters())
    training = [part for part in loaded.module.modules() if part.training]
    x, t, y = _inputs(loaded.fit, first.device, t)
    x = x.double() if first.dtype == torch.float64 else x
    arguments, named = loaded.rules.arguments(x, t, y)
    swapped = {f"module.{name}": value for name, value in (weights or {}).items()}
    called = _Method(loaded.module, method)
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
            out = functional_call(called, swapped, (*arguments, *more), named)
            return loaded.rules.output(out).detach()
        except Exception as error:  # of code that is not ours
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
            raise UsageError(
                f"{loaded.name}: cannot be evaluated as a {loaded.fit.family.name} ({reason}); "
                "check=False skips this"
            ) from None
        finally:
            for part in training:
                part.training = True


class _Method(nn.Module):
    """A wrapper whose forward is a method of the module, for functional_call. __call__ is the
    module with its hooks.
    """

    def __init__(self, module: nn.Module, method: str):
        super().__init__()
        self.module = module
        self.forward = getattr(module, method)


def _not_compiled():
    """Return a context in which modules and functions that torch compiles run as they are written.

    Where torch's compiler is not loaded, which takes seconds, nothing is compiled.
    """
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance("force_eager")
    return nullcontext()
