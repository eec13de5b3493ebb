"""Compare a network that the caller holds with copies of it on noise: the same function, the same
guidance.
"""

import sys
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.func import functional_call

from accel.checkpoints.module import HeldModule
from accel.families.spec import ModelSpec, StateDict, reference_state
from accel.runtime.network import BlockNetwork, EagerNetwork
from accel.runtime.precision import TIERS, arithmetic
from accel.sampling.guidance import guided_halves

# Relative error of an evaluation beyond which it is another function's, by tier and by
# the module's own dtype.
TOLERANCE = {"fp32": 1e-4, "exact": 1e-4, "tf32": 1e-2, "fp16": 1e-2, "bf16": 5e-2}
SAME = 3e-5  # of a float32 module and the reference network, which compute alike
ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 5e-2}


def build(state: StateDict, spec: ModelSpec, tier: str, device: torch.device) -> BlockNetwork:
    """Return the network of a tier for latents of the trained size: the reference network for
    fp32 and tf32, an accelerated one otherwise. The weights, under the names of the reference
    network, are copied.
    """
    model = spec.empty()
    if TIERS[tier].accelerated:
        from accel import fast  # brings Triton; the other tiers need not wait for it

        return fast.build(state, model, spec.family.pack, tier, device)
    return _reference(
        model,
        {name: value.to(device, torch.float32, copy=True) for name, value in state.items()},
    )


def _reference(model: nn.Module, state: StateDict) -> EagerNetwork:
    model.load_state_dict(state, strict=True, assign=True)
    return EagerNetwork(model.eval().requires_grad_(False))


def _inputs(spec: ModelSpec, device: torch.device, t: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, t, y: the same on every device. Of a model with a null class these are two batch
    rows, of the same noise, one with a class and one with the null class; else one row.
    """
    generator = torch.Generator().manual_seed(0)
    shape = 1, spec.in_channels, spec.trained_side, spec.trained_side
    x = torch.randn(*shape, generator=generator)
    y = torch.randint(spec.num_classes, (1,), generator=generator)
    if spec.null_class:
        x = torch.cat([x, x])
        y = torch.cat([y, torch.full_like(y, spec.num_classes)])
    return x.to(device), torch.full((len(y),), t, device=device), y.to(device)


def require_same(network: BlockNetwork, held: HeldModule, tier: str, side: int) -> None:
    """Raise UsageError unless what the caller gave, wrappers and hooks included, has the output of
    the float32 reference network with its weights on noise, with a class and with the null class,
    at some times; and `network`, of the tier, for latents of this side, too where the module is for
    such latents. What returns zero, as an untrained network does, is compared with noise in
    place of its zero weights.
    """
    spec = held.spec
    weights = None
    state = held.source.state
    outputs = [_evaluate(held, t) for t in spec.some_times]
    is_zero = not outputs[0].any()
    if is_zero:
        weights = _not_zero(held)
        state = reference_state(spec, held.renamed(weights))
        outputs = [_evaluate(held, t, weights) for t in spec.some_times]
    reference = _reference(spec.empty(), {name: part.float() for name, part in state.items()})
    with arithmetic("fp32"):
        _require_close(reference, held, outputs, max(SAME, _rounding(held)))
    if side == spec.latent_size and not is_zero:
        _require_close(network, held, outputs, max(TOLERANCE[tier], _rounding(held)))


def _require_close(
    network: BlockNetwork, held: HeldModule, outputs: list[Tensor], tolerance: float
) -> None:
    """Raise UsageError unless a network has these outputs at some times, but for a relative
    error.
    """
    spec = held.spec
    device = next(network.parameters()).device
    for t, want in zip(spec.some_times, outputs):
        got = network.forward(*_inputs(spec, device, t))
        if want.shape != got.shape:
            raise held.given.error(
                f"returns {tuple(want.shape)}, and a {spec.family.name} with these weights "
                f"{tuple(got.shape)}: another network"
            )
        if not want.isfinite().all():
            raise held.given.error("its own output is not finite", "check the weights")
        wanted = want.to(got)
        errors = (got - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
        error = float(errors.amax())  # of either row
        if not error <= tolerance:
            raise held.given.error(
                f"computes another function than a {spec.family.name} with these weights: relative "
                f"error {error:.1g} at t = {t:g}, {tolerance:g} is allowed",
                "check=False skips this check",
            )


def own_guidance(held: HeldModule) -> int | None:
    """Return how many channels, from the first on, the module's forward_with_cfg guides by
    uncond + scale·(cond − uncond); 0 if it guides otherwise, None if there is no such method.

    Its output is compared with that of forward, at two times and scales.
    """
    spec = held.spec
    has_method = hasattr(held.module, "forward_with_cfg") and not held.rules.face
    if not has_method or not spec.null_class:
        return None
    weights = None if _evaluate(held, spec.some_times[0]).any() else _not_zero(held)
    outputs = []
    for t, scale in zip(spec.some_times, (1.7, 3.1)):
        plain = _evaluate(held, t, weights, "forward").float()
        its_own = _evaluate(held, t, weights, "forward_with_cfg", scale).float()
        if its_own.shape != plain.shape:
            return 0
        largest = guided_halves(plain, scale, spec.out_channels).abs().amax().clamp(min=1e-9)
        outputs.append((scale, plain, its_own, largest))

    def error(channels):
        """Return the largest error, relative to guidance of all channels."""
        errors = [
            (its_own - guided_halves(plain, scale, channels)).abs().amax() / largest
            for scale, plain, its_own, largest in outputs
        ]
        return float(torch.stack(errors).amax())  # NaN if there is one

    # Where guidance changes nothing, every number fits: take the family's.
    usual = spec.defaults.guidance_channels
    numbers = range(1, spec.out_channels + 1)
    likely = min(numbers, key=lambda n: (error(n), abs(n - usual)))
    # TF32, where the caller allows it, may round differently in each call.
    return likely if error(likely) <= max(1e-2, _rounding(held)) else 0


def _rounding(held):
    """Return the relative error that the dtype of the module's weights explains."""
    return ROUNDING.get(next(held.module.parameters()).dtype, 0)


def _not_zero(held):
    """Return the module's weights, with noise in place of tensors that are zero."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: value
        if value.any()
        else torch.randn(value.shape, generator=generator).mul(0.1).to(value)
        for name, value in held.module.state_dict().items()
    }


def _evaluate(
    held: HeldModule,
    t: float,
    weights: StateDict | None = None,
    method: str = "",
    *more: float,
) -> Tensor:
    """Evaluate what the caller gave on noise, in evaluation mode, in true float32, as it is
    written: compiled parts are not compiled for this. weights: in place of the module's own.
    method: of the module itself, with the arguments `more` after x, t, y. The module, its mode and
    the random state are left as they were.
    """
    called = _Method(held.module, method) if method else _Method(held.whole, "__call__")
    first = next(held.module.parameters())
    training = [part for part in called.modules() if part is not called and part.training]
    x, timesteps, y = _inputs(held.spec, first.device, t)
    x = x.double() if first.dtype == torch.float64 else x
    arguments, named = held.rules.arguments(x, timesteps, y)
    swapped = {}
    if weights is not None:
        own = held.module.state_dict(keep_vars=True)
        by_tensor = {id(own[name]): value for name, value in weights.items()}
        inside = [*called.named_parameters(), *called.named_buffers()]
        swapped = {name: by_tensor[id(part)] for name, part in inside if id(part) in by_tensor}
    gpus = [first.device] if first.is_cuda else []
    half = first.dtype in ROUNDING
    with (
        _not_compiled(),
        arithmetic("fp32"),
        torch.random.fork_rng(gpus),
        torch.autocast(first.device.type, first.dtype if half else None, enabled=half),
    ):
        try:
            for part in training:
                part.training = False
            out = functional_call(called, swapped, (*arguments, *more), named)
            return held.rules.output(out).detach()
        except Exception as error:  # of code that is not ours
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
            raise held.given.error(
                f"cannot be evaluated as a {held.spec.family.name} ({reason})",
                "check=False skips this",
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


def _not_compiled() -> AbstractContextManager:
    """Return a context in which modules and functions that torch compiles run as they are written.

    Where torch's compiler is not loaded, which takes seconds, nothing is compiled.
    """
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance("force_eager")
    return nullcontext()
