"""`accelerate`: a fast copy of a model with the same signature, for the caller's sampling loop."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from accel.checkpoints import Checkpoint
from accel.checkpoints.compare import require_same
from accel.checkpoints.module import StateTensors, from_module, from_state, unwrapped
from accel.config.options import OPTIONS
from accel.errors import InputRef, UsageError
from accel.families.spec import CallAdapter
from accel.runtime.network import Batch, BlockNetwork, require_no_gradients
from accel.runtime.overflow import require_finite
from accel.runtime.precision import arithmetic, default_tier, exclusive, require
from accel.sampling.guidance import guided_halves

NO_GRADIENTS = "this copy has none; call the model itself for gradients"


def accelerate(
    model: nn.Module,
    precision: str | None = None,
    device: torch.device | str | int | None = None,
    *,
    guidance_channels: int | None = None,
    check: bool = True,
) -> "Accelerated":
    """Return a fast copy of a trained model for sampling.

    The copy has the model's signature: for models.DiT `forward(x, t, y)` and
    `forward_with_cfg(x, t, y, cfg_scale)`. Training the model further does not change the copy.

    model: models.DiT, any other family in accel/families or its original class, or diffusers'
    DiTTransformer2DModel. Wrapped and compiled models are unwrapped. precision: "fp16", "bf16",
    "exact", "tf32", "fp32-fused" or "fp32"; default: fp16 on a GPU with tensor cores, else fp32.
    device: default: the model's. guidance_channels: forward_with_cfg guides the first so many
    channels; default: as the family. check: compare the outputs of model and copy on noise.

    Raises ValueError (one line) if the device lacks the precision, if the weights overflow it, or
    if the model does not compute its family's function.
    """
    with exclusive():
        checkpoint, adapter = from_module(model)
        if device is None:
            device = next(iter(checkpoint.tensors.state.values())).device
        try:
            device = torch.empty(0, device=device).device  # with an index
        except (RuntimeError, AssertionError, TypeError) as error:
            raise UsageError(f"device {device}: {str(error).splitlines()[0]}") from None
        tier = default_tier(device) if precision is None else precision
        require("precision", tier, device)
        spec = checkpoint.spec
        most = max(spec.in_channels, spec.recommended["guidance_channels"])
        if guidance_channels is not None:
            guidance_channels = OPTIONS["guidance_channels"].checked(guidance_channels)
        if guidance_channels not in (None, *range(1, most + 1)):
            raise UsageError(
                f"must be from 1 to {most}", parameter="guidance_channels", value=guidance_channels
            )
        return Accelerated(checkpoint, adapter, tier, device, check, guidance_channels)


class Accelerated:
    """An accelerated network with a model's methods.

    It is not an nn.Module, since in-place conversions would break the layout and addresses of its
    tensors. Calls from several threads are serialised. On a GPU, the first call with a shape
    captures a CUDA graph, and later calls replay it for any guidance scale. The caller's autocast,
    inference mode, default dtype and TF32 switches have no effect.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        adapter: CallAdapter,
        tier: str,
        device: torch.device,
        check: bool,
        guidance_channels: int | None,
    ):
        self._adapter = adapter._replace(module=None)
        vars(self).update(adapter.attributes)
        self.precision = tier
        self.device = device
        self._spec = spec = checkpoint.spec
        self.in_channels = spec.in_channels
        self.out_channels = spec.out_channels
        self.num_classes = spec.num_classes
        self.input_size = spec.trained_side
        self.guidance_channels = guidance_channels or spec.recommended["guidance_channels"]
        with self._running():
            self.network = network = self._build(checkpoint)
            if check:
                require_same(network, checkpoint, adapter, tier, self.guidance_channels)
        self._replay()
        self._module: Callable[[], nn.Module | None] = weakref.ref(unwrapped(adapter.module))
        self._loaded: Mapping[str, Tensor] | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Return the class that pipelines expect."""
        return self._adapter.imitates or Accelerated

    def _replay(self) -> None:
        """Choose eager functions, or on a GPU one CUDA graph per shape."""
        network = self.network
        self._forward: Callable[..., Tensor] = network.forward
        self._guided: Callable[..., Tensor] = self._forward_guided
        if network.captures and self.device.type == "cuda":
            self._forward = network.graphed("forward", self._forward)
            self._guided = network.graphed("guided", self._guided)

    def __deepcopy__(self, memo: dict) -> "Accelerated":
        """Return a copy with separate weights."""
        spec = self._spec
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        memo[id(self)] = other
        with self._running():
            shapes = spec.empty(self.input_size).state_dict()
            zeros = {name: torch.zeros(value.shape) for name, value in shapes.items()}
            checkpoint = Checkpoint(InputRef(spec.model, ""), spec, StateTensors(zeros))
            other.network = checkpoint.build(self.precision, self.device)
            other.network.copy_weights(self.network)
            other._replay()
        return other

    def __reduce__(self):
        raise UsageError(
            "an accelerated copy cannot be pickled",
            "save the model's state dict, and call accelerate again; copy.deepcopy copies it",
        )

    def _build(self, checkpoint: Checkpoint) -> BlockNetwork:
        """Build the network with a copy of the weights. Raises UsageError on overflow."""
        spec = checkpoint.spec
        network = checkpoint.build(self.precision, self.device)
        batch = Batch([(1, 1)], self.input_size, spec.num_classes)
        require_finite(network, self.precision, batch, self.device, spec.family.some_times)
        return network

    @contextmanager
    def _running(self) -> Iterator[None]:
        with exclusive(), arithmetic(self.precision):
            yield

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Evaluate the network with the module's signature, for models.DiT: x (N, C, H, W), t (N,),
        y (N,) → (N, C', H, W) in x's dtype. Optional arguments must be None or False. Raises
        ValueError if an input requires gradients.
        """
        return self._adapter.forward(self._evaluate, *arguments, **keywords)

    def _evaluate(self, x: Tensor, t: Tensor, y: Tensor, *others: Any, **named: Any) -> Tensor:
        given = {f"argument {4 + i}": value for i, value in enumerate(others)} | named
        for name, value in given.items():
            if value is not None and value is not False:
                raise UsageError(
                    f"forward: {name} must be None, this copy computes with x, t and y only; call "
                    "the model itself"
                )
        self._require_inputs(x, t, y)
        require_no_gradients(NO_GRADIENTS, x, t)
        with self._running():
            return self._forward(x.float(), t, y).to(x.dtype)

    @torch.no_grad()
    def _forward_guided(self, x, t, y, scale):
        out = self.network.forward(x[: len(x) // 2], t, y)  # (2N, C', H, W)
        return guided_halves(out, scale, self.guidance_channels)

    def forward_with_cfg(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Evaluate with guidance and the module's signature, for models.DiT: x (2N, C, H, W), of
        which only the first N rows are read, t and y (2N,), cfg_scale → (2N, C', H, W). Raises
        ValueError if an input requires gradients.
        """
        return self._adapter.forward_with_cfg(self._evaluate_guided, *arguments, **keywords)

    def _evaluate_guided(
        self, x: Tensor, t: Tensor, y: Tensor, cfg_scale: float | Tensor
    ) -> Tensor:
        if not self._spec.null_class:
            raise UsageError(
                "forward_with_cfg: the model has no null class (label dropout), no guidance; use "
                "forward"
            )
        self._require_inputs(x, t, y, multiple=2)
        require_no_gradients(NO_GRADIENTS, x, t, cfg_scale)
        with self._running():
            # A device tensor, so that one captured graph serves all values.
            if torch.is_tensor(cfg_scale):
                cfg_scale = cfg_scale.to(self.device, torch.float32)
            else:
                cfg_scale = torch.full((), cfg_scale, dtype=torch.float32, device=self.device)
            return self._guided(x.float(), t, y, cfg_scale).to(x.dtype)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.forward(*arguments, **keywords)

    def _require_inputs(self, x, t, y, multiple=1):
        for name, value in (("x", x), ("t", t), ("y", y)):
            if not torch.is_tensor(value):
                raise UsageError(f"{name} is {type(value).__name__}, must be a tensor")
            if value.device != self.device:
                raise UsageError(f"{name} is on {value.device}, the weights are on {self.device}")
        if not x.is_floating_point():
            raise UsageError(f"x is {x.dtype}, must be a tensor of floats")
        n = len(x) if x.ndim else 0
        shape = (self.in_channels, self.input_size, self.input_size)
        if x.shape[1:] != shape or n % multiple or not n:
            rows = "2N" if multiple == 2 else "N"
            raise UsageError(f"x is {tuple(x.shape)}, must be {(rows, *shape)}".replace("'", ""))
        for name, value in (("t", t), ("y", y)):
            if value.shape != (n,):
                raise UsageError(
                    f"{name} is {tuple(value.shape)}, must be ({n},), one for each row of x"
                )
        # On a GPU reading y would synchronise; there the embedding look-up fails.
        rows = self.num_classes + self._spec.null_class
        if self.device.type == "cpu" and not 0 <= int(y.min()) <= int(y.max()) < rows:
            raise UsageError(f"y is {int(y.min())} to {int(y.max())}, must be from 0 to {rows - 1}")

    # ---- Methods of nn.Module ----

    def eval(self) -> "Accelerated":
        """No-op: the copy is always in eval mode."""
        return self

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "Accelerated":
        """No-op if device and dtype are the copy's. Raises ValueError if not, since captured graphs
        cannot move.
        """
        if isinstance(device, torch.dtype):
            dtype = device
            device = None
        if dtype not in (None, getattr(self, "dtype", None)):
            raise UsageError(
                f"to({dtype}): the precision is {self.precision}; use accelerate(model, "
                "precision=…)"
            )
        device = self.device if device is None else torch.device(device)
        if device.type != self.device.type or device.index not in (None, self.device.index):
            raise UsageError(
                f"to({str(device)!r}): the weights are on {self.device}; use accelerate(model, "
                f"device='{device}')"
            )
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return the last loaded state dict, or else the current one of the original model. Raises
        ValueError if the model was deleted.
        """
        if self._loaded is not None:
            return dict(self._loaded)
        model = self._module()
        if model is None:
            raise UsageError(
                "state_dict(): the model that the weights came from is gone",
                "keep it, or the state dict, to save them",
            )
        return model.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Load a state dict of the model in place. Captured graphs stay valid, and outputs are
        bit-identical to those of a new copy. If the weights do not fit or overflow the precision,
        raise ValueError and keep the old weights.
        """
        if not strict:
            raise UsageError(
                "load_state_dict(strict=False): all weights are needed; give the whole state dict"
            )
        with self._running():
            given = InputRef("load_state_dict", "")
            renamed = self._adapter.renamed
            checkpoint = from_state(given, state, self._spec, self.input_size, renamed)
            self.network.copy_weights(self._build(checkpoint))
        self._loaded = dict(state)
