"""What `accelerate` returns: a network behind a model's face, for sampling loops of the caller's own."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from accel.errors import UsageError
from accel.fast import build
from accel.graphs import Replayed
from accel.network import BlockNetwork, unpatchify
from accel.precision import TIERS, alone, apply_precision, default_tier, require, supports
from accel.sampling.guidance import CHANNELS, guided
from accel.weights.held import Held, require_fit

KEPT = 4  # captured graphs of `forward`, and as many of `forward_with_cfg`: each shape is one
# Relative error of an evaluation beyond which it is another function's, by tier and by the module's own dtype.
TOLERANCE = {"fp32": 1e-4, "exact": 1e-4, "tf32": 1e-2, "fp16": 1e-2, "bf16": 5e-2}
ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 5e-2}


def accelerate(
    model: nn.Module,
    precision: str | None = None,
    device: torch.device | str | None = None,
    *,
    check: bool = True,
) -> "Accelerated":
    """A fast copy of a trained DiT, Large-DiT or SiT for sampling, with `forward(x, t, y)` and
    `forward_with_cfg(x, t, y, cfg_scale)`.

    The weights are copied, to `device` or where they are: training `model` further does not change the copy.

    model: models.DiT, large_dit.DiT_Llama, sit.SiT or the original classes, with the published state-dict keys; wrapped
    and compiled ones are unwrapped. Of diffusers a DiTTransformer2DModel, and REPA's SiT: the copy then has its face
    and its function.
    precision: "fp16", "bf16", "exact", "tf32" or "fp32"; default: fp16 on a GPU with tensor cores, else
    fp32. check: evaluate both on a batch row of noise and compare.

    Raises ValueError, of one line: for a tier that the device lacks or that the weights overflow, for another network,
    and where the check finds one.
    """
    with alone():
        held = Held(model)
        device = _device(held.state["final_layer.linear.weight"].device if device is None else device)
        tier = precision or default_tier(device)
        require("precision", tier, device)
        face = AcceleratedTransformer if held.of_diffusers else AcceleratedRepa if held.of_repa else Accelerated
        return face(held, tier, device, check)


def _device(device):
    try:
        device = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {device}: {str(error).splitlines()[0]}") from None
    if device.type == "meta":
        raise UsageError("device meta: holds no values; load the weights first")
    return device


class Accelerated:
    """An accelerated network where callers expect a model.

    It is no nn.Module: its tensors are a layout of its own at fixed addresses, which conversions in place would break.
    Callers in several threads are served one at a time. On a GPU the first call with a shape captures a CUDA graph,
    whatever the guidance, and later ones replay it. The caller's autocast, inference mode, default dtype and TF32
    switches change nothing.
    """

    training = False

    def __init__(self, held: Held, tier: str, device: torch.device, check: bool):
        self.precision, self.device, self._held = tier, device, held
        self.network = network = build(held.state, held.model, tier, device)
        with self._running():
            require_finite(network, held, held.state, tier)
            if check:
                require_same(network, held, tier)
        self.in_channels, self.out_channels = held.model.in_channels, held.model.out_channels
        self.num_classes, self.input_size = held.num_classes, held.side
        self._forward, self._guided = network.forward, self._forward_guided
        if network.captures and device.type == "cuda":
            self._forward, self._guided = Replayed(self._forward, KEPT), Replayed(self._guided, KEPT)
        self._source = weakref.ref(held.module)
        held.release()

    @contextmanager
    def _running(self) -> Iterator[None]:
        with alone():
            apply_precision(self.precision, self.device)
            yield

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """As models.DiT.forward: x (N, C, H, W), t (N,), y (N,) → (N, C', H, W) in x's dtype."""
        self._require_inputs(x, t, y)
        with self._running():
            return self._forward(x, t, y)

    @torch.no_grad()
    def _forward_guided(self, x, t, y, scale):
        out = unpatchify(self.network.tokens(x[: len(x) // 2], t, y), self.network.patch_size)  # (2N, C', H, W)
        eps = guided(out, scale)
        return torch.cat([torch.cat([eps, eps]), out[:, CHANNELS:]], dim=1).to(x.dtype)

    def forward_with_cfg(self, x: Tensor, t: Tensor, y: Tensor, cfg_scale: float | Tensor) -> Tensor:
        """As models.DiT.forward_with_cfg: x (2N, C, H, W), of which the first N rows are read; t, y (2N,)."""
        if not self._held.null_row:
            raise UsageError("forward_with_cfg: the model has no null class (label dropout), no guidance; use forward")
        self._require_inputs(x, t, y, multiple=2)
        with self._running():
            # On the device: one captured graph serves every value.
            if torch.is_tensor(cfg_scale):
                cfg_scale = cfg_scale.to(self.device, torch.float32)
            else:
                cfg_scale = torch.full((), cfg_scale, dtype=torch.float32, device=self.device)
            return self._guided(x, t, y, cfg_scale)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.forward(*arguments, **keywords)

    def _require_inputs(self, x, t, y, multiple=1):
        n, shape = len(x), (self.in_channels, self.input_size, self.input_size)
        if x.shape[1:] != shape or n % multiple or not n:
            rows = "2N" if multiple == 2 else "N"
            raise UsageError(f"x is {tuple(x.shape)}, must be {(rows, *shape)}".replace("'", ""))
        for name, value in (("x", x), ("t", t), ("y", y)):
            if value.device != self.device:
                raise UsageError(f"{name} is on {value.device}, the weights are on {self.device}")
            if name != "x" and value.shape != (n,):
                raise UsageError(f"{name} is {tuple(value.shape)}, must be ({n},), one for each row of x")

    # ---- as callers use a module ----

    def eval(self) -> "Accelerated":
        """Itself: it only ever evaluates."""
        return self

    def train(self, mode: bool = True) -> "Accelerated":
        """Itself for train(False). Raises ValueError for training."""
        if mode:
            raise UsageError("train(): this copy only evaluates; train the model, and load_state_dict its weights here")
        return self

    def to(self, device: torch.device | str) -> "Accelerated":
        """Itself, if its weights are on `device`. Raises ValueError if not: captured steps cannot move."""
        if isinstance(device, torch.dtype):
            raise UsageError(f"to({device}): the precision is {self.precision}; use accelerate(model, precision=…)")
        device = torch.device(device)
        if device.type != self.device.type or device.index not in (None, self.device.index):
            raise UsageError(
                f"to({str(device)!r}): the weights are on {self.device}; use accelerate(model, device='{device}')"
            )
        return self

    def parameters(self) -> Iterator[Tensor]:
        """The tensors that it computes with, in a layout and precision of its own."""
        return self.network.parameters()

    def state_dict(self) -> dict[str, Tensor]:
        """That of the model that it was made from, as it is now. Raises ValueError if that is gone, or if other weights
        were loaded since."""
        model = self._source and self._source()
        if model is None:
            raise UsageError(
                "state_dict(): the model that the weights came from is gone; keep it, or the state dict, to save them"
            )
        return model.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Take the weights of `state`, the model's state dict, in place: captured graphs stay valid, and the outputs
        are those of a new copy to the bit. Raises ValueError, and keeps the weights it has, for a state dict that does
        not fit, and for weights that overflow its precision."""
        if not strict:
            raise UsageError("load_state_dict(strict=False): all weights are needed; give the whole state dict")
        with self._running():
            state = self._held.read(state)
            require_fit("load_state_dict", state, self._held.model)
            old = self.network
            new = build(state, self._held.model, self.precision, self.device, old.tuner)
            old.exchange(new)
            try:
                require_finite(old, self._held, state, self.precision)
            except UsageError:
                old.exchange(new)
                raise
        self._source = None


class AcceleratedTransformer(Accelerated):
    """The same with the face of diffusers' DiTTransformer2DModel: `pipe.transformer = accelerate(pipe.transformer)`."""

    def __init__(self, held: Held, *how: Any):
        self.config, self.dtype = held.config, held.module.dtype
        super().__init__(held, *how)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        class_labels: Tensor,
        cross_attention_kwargs: None = None,
        return_dict: bool = True,
    ) -> Any:
        """As DiTTransformer2DModel.forward: an object with the output as `sample`, or a tuple of it."""
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        sample = super().forward(hidden_states, timestep, class_labels)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)


class AcceleratedRepa(Accelerated):
    """The same with the face of REPA's SiT, whose time and velocity run the other way."""

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> tuple[Tensor, tuple]:
        """(N, C, H, W), and no features: those are for training."""
        return -super().forward(x, 1 - t, y), ()

    def forward_with_cfg(self, x: Tensor, t: Tensor, y: Tensor, cfg_scale: float | Tensor) -> Tensor:
        return -super().forward_with_cfg(x, 1 - t, y, cfg_scale)


#################################################################################
#                            Checks of a network's values                       #
#################################################################################


def _inputs(held, device, t=None):
    """A batch row of noise with a class at time t, by default the first of some, the same on every device."""
    t = held.model.SOME_TIMES[0] if t is None else t
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, held.model.in_channels, held.side, held.side, generator=generator)
    y = torch.randint(held.num_classes, (1,), generator=generator)
    return x.to(device), torch.tensor([t], device=device), y.to(device)


def require_finite(network: BlockNetwork, held: Held, state: dict[str, Tensor], tier: str) -> None:
    """Raise UsageError, naming what overflows, if weights `state` or what they compute leave the tier's range."""
    if not TIERS[tier].accelerated:
        return
    device = next(network.parameters()).device
    for inputs in (_inputs(held, device, t) for t in held.model.SOME_TIMES):
        if network.forward(*inputs).isfinite().all():
            continue
        largest = torch.finfo(TIERS[tier].dtype).max
        where = next((name for name, value in state.items() if not value.abs().amax() <= largest), None)
        where = where or network.overflowed()
        if where is None:
            depths = range(1, network.depth + 1)
            finite = (bool(network.shallow(depth).forward(*inputs).isfinite().all()) for depth in depths)
            where = f"block {next((i for i, fine in enumerate(finite) if not fine), network.depth - 1)}"
        other = "bf16" if tier == "fp16" and supports("bf16", device) else "fp32"
        raise UsageError(f"`precision={tier}`: {where} gives values that it does not hold; use {other}")


def require_same(network: BlockNetwork, held: Held, tier: str) -> None:
    """Raise UsageError unless `network` computes what the module computes, on a batch row of noise.

    The module, its mode and the random state are afterwards what they were. A module whose output is zero, as an
    untrained one's is, is compared with noise in place of weights that are zero.
    """
    device = next(network.parameters()).device
    want, got = _output(held), network.forward(*_inputs(held, device))
    if not want.any():
        generator, tier = torch.Generator().manual_seed(1), "fp32"
        weights = {
            name: value if value.any() else torch.randn(value.shape, generator=generator).mul(0.1).to(value)
            for name, value in held.module.state_dict().items()
        }
        want = _output(held, weights)
        got = build(held.read(weights), held.model, tier, device).forward(*_inputs(held, device))
    if want.shape != got.shape:
        raise UsageError(
            f"{held.name}: returns {tuple(want.shape)}, a DiT with these weights {tuple(got.shape)}: another network"
        )
    if not want.isfinite().all():
        raise UsageError(f"{held.name}: its own output is not finite; check the weights")
    error = float((got.to(want) - want).norm() / want.norm())
    tolerance = max(TOLERANCE[tier], ROUNDING.get(next(held.module.parameters()).dtype, 0))
    if not error <= tolerance:
        raise UsageError(
            f"{held.name}: computes another function than a DiT with these weights: relative error {error:.1g}, "
            f"{tolerance:g} is allowed; check=False skips this check"
        )


def _output(held, weights=None):
    """What the module gives, with `weights` in place of its own, evaluating and otherwise left as it is."""
    module, first = held.module, next(held.module.parameters())
    training = [one for one in module.modules() if one.training]
    x, t, y = _inputs(held, first.device)
    x = x.double() if first.dtype == torch.float64 else x
    gpus = [first.device] if first.is_cuda else []
    half = first.dtype in ROUNDING
    with torch.random.fork_rng(gpus), torch.autocast(first.device.type, first.dtype if half else None, enabled=half):
        try:
            for one in training:
                one.training = False
            return held.evaluate(x, t, y, weights)
        except Exception as error:  # of code that is not ours
            reason = (str(error).splitlines() or [""])[0][:120]
            raise UsageError(
                f"{held.name}: cannot be evaluated as a DiT ({type(error).__name__}: {reason}); check=False skips this"
            ) from None
        finally:
            for one in training:
                one.training = True
