"""The Network protocol: the interface between networks and the sampling loop or the
ranks.

Accelerated networks (accel/fast), reference models (Plain below) and networks shared by
GPUs (accel/ranks) have it. A network knows nothing of guidance.

Shapes: N batch rows, n latents (N is a multiple of n), C latent channels, H = W latent
side, p patch side, T = (H/p)² tokens, D width.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from accel.errors import UsageError
from accel.graphs import Latest, Replayed
from accel.precision import supports

KEPT = 4  # graphs kept, one per (process, guidance)


def unpatchify(tokens: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Assemble the tokens (N, T, p·p·C) of a square picture → (N, C, H, W). The order
    inside a token is (p, p, C).
    """
    side = round(tokens.shape[1] ** 0.5)
    p = patch_size
    x = tokens.unflatten(-1, (p, p, -1)).unflatten(1, (side, side))  # (N, side, side, p, p, C)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(len(x), -1, side * p, side * p)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside DataParallel, DistributedDataParallel, AveragedModel and
    torch.compile. Raises UsageError for hooks of a wrapper: the model runs without them.
    """
    wrappers = (
        torch.nn.DataParallel,
        torch.nn.parallel.DistributedDataParallel,
        torch.optim.swa_utils.AveragedModel,
    )
    while isinstance(model, wrappers) or hasattr(model, "_orig_mod"):
        if model._forward_hooks or model._forward_pre_hooks:
            name = type(model).__name__
            raise UsageError(f"{name}: has forward hooks, which would not run; remove them first")
        model = model.module if isinstance(model, wrappers) else model._orig_mod
    return model


class Part(NamedTuple):
    """A rank's part of every GEMM's weights: heads and hidden width are divided (Shoeybi
    et al. 2019, arXiv:1909.08053, section 3).
    """

    rank: int = 0
    ranks: int = 1
    # sums a tensor over the ranks, in place
    all_reduce: Callable[[torch.Tensor], object] | None = None

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over the ranks, in place, and return it."""
        if self.ranks > 1:
            self.all_reduce(x)
        return x


WHOLE = Part()


class Batch(NamedTuple):
    """The network evaluations for which a network is compiled, tuned and checked."""

    # every (latents, batch rows of each) that a rank evaluates, the most rows first
    rows: list[tuple[int, int]]
    side: int  # of a latent
    num_classes: int


class Network(ABC):
    """A network that is ready to sample. Subclasses define `tokens` and `schedule`; the
    rest has defaults.
    """

    patch_size: int
    in_channels: int
    captures = False  # whether the sampling loop captures a step as a CUDA graph

    def __init__(self):
        self._replayed = Latest(KEPT)

    @abstractmethod
    def tokens(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Evaluate x (n, C, H, W), repeated to N batch rows, at t (N,), y (N,) → the last
        tokens (N, T, p·p·C').
        """

    @torch.no_grad()
    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Evaluate as models.DiT.forward does: x (n, C, H, W), t (N,), y (N,) → (N, C',
        H, W) in x's dtype.
        """
        return unpatchify(self.tokens(x, t, y), self.patch_size).to(x.dtype)

    @abstractmethod
    def schedule(
        self, times: list[float], labels: list[int], at_once: int = 1
    ) -> tuple["Network", Callable[..., None]]:
        """Prepare a sampling run → (this network, whose t is the index of an evaluation;
        `advance`).

        advance(i, …) must precede the evaluations i, … of the run. times: of each
        evaluation, in order; labels: all of them; at_once: the most evaluations in one
        call of `advance`. One run at a time.
        """

    def replayed(self, key: Hashable, step: Callable) -> Callable:
        """Return `step` as a CUDA graph. The first step of a key serves all later ones;
        the last KEPT keys are kept.
        """
        return self._replayed.obtain(key, lambda: Replayed(step))

    def tune(self, row_tokens: Iterable[int]) -> None:
        """Choose the fastest GEMMs for each of `row_tokens`, batch rows × tokens of a
        row. Here: no-op.
        """
        return None

    def overflowed(self) -> str | None:
        """Return the first layer whose values left the number format's range in any
        evaluation so far, or None.
        """
        return None


class BlockNetwork(Network):
    """A network of transformer blocks, which ranks can share by batch rows or by tokens.

    attention(qkv, num_heads): packed (N, T, 3·D) → (N, T, D), all tokens on this device.
    exchanges: names of the token exchanges (accel/ranks/exchanges.py) that keep the
    accuracy, the fastest first.
    """

    depth: int
    width: int
    num_heads: int
    dtype: torch.dtype
    attention: Callable
    exchanges = ("push", "kv", "ulysses")

    @abstractmethod
    def parameters(self) -> Iterator[torch.Tensor]:
        """Return all tensors that depend on the weights, in their layout and precision of
        computation.
        """

    @torch.no_grad()
    def copy_weights(self, other: "BlockNetwork") -> None:
        """Copy the weights of a network of the same tier and shape in place: captured
        graphs stay valid.
        """
        for own, new in zip(self.parameters(), other.parameters(), strict=True):
            own.copy_(new)

    @abstractmethod
    def embed(self, x: torch.Tensor, tokens: slice = slice(None), copies: int = 1) -> torch.Tensor:
        """Embed latents (n, C, H, W) → tokens (copies·n, t, D) of the slice `tokens`, the
        batch `copies` times.
        """

    @abstractmethod
    def condition(self, t: torch.Tensor, y: torch.Tensor) -> Any:
        """Return the blocks' conditioning for timesteps t (N,) and labels y (N,)."""

    @abstractmethod
    def forward_blocks(
        self, h: torch.Tensor, condition: Any, attend: Callable, tokens: slice = slice(None)
    ) -> torch.Tensor:
        """Apply all blocks and the final layer: h (N, t, D), which may be overwritten →
        (N, t, p·p·C').

        attend: `attention`, or an exchange with other devices' tokens. tokens: the slice
        of each row that h holds.
        """

    def shallow(self, depth: int) -> "BlockNetwork":
        """Return the network of the first `depth` blocks, sharing the weights; for measurements."""
        network = copy.copy(self)
        network.depth = depth
        network._replayed = Latest(KEPT)
        return network

    def describe(self) -> str:
        """Describe the properties that speed depends on: the key of kept measurements."""
        return f"{type(self).__name__} of {self.depth} blocks of {self.width}, {self.dtype}"

    @torch.no_grad()
    def tokens(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x, copies=len(y) // len(x))  # (N, T, D)
        return self.forward_blocks(h, self.condition(t, y), self.attention)

    def schedule(
        self, times: list[float], labels: list[int], at_once: int = 1
    ) -> tuple[Network, Callable[..., None]]:
        table = torch.tensor(times, device=next(self.parameters()).device)  # uploaded once
        return self.conditioned(
            lambda index, y: self.condition(table[index], y)
        ), lambda *evaluations: None

    def conditioned(self, condition: Callable[[torch.Tensor, torch.Tensor], Any]) -> "BlockNetwork":
        """Return this network with another `condition`."""
        network = copy.copy(self)
        network.condition = condition
        return network


class Plain(BlockNetwork):
    """A reference network, tiers fp32 and tf32: a module with `embed`, `condition`,
    `blocks`, `transform`, `head` and `attend`.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.attention = model.attend
        self.model = model
        self.depth = len(model.blocks)
        self.num_heads = model.num_heads
        self.patch_size = model.patch_size
        self.in_channels = model.in_channels
        weight = next(model.blocks[0].parameters())  # of a block's first layer
        self.width = weight.shape[-1]
        self.dtype = weight.dtype

    def parameters(self) -> Iterator[torch.Tensor]:
        return self.model.parameters()

    def embed(self, x: torch.Tensor, tokens: slice = slice(None), copies: int = 1) -> torch.Tensor:
        return self.model.embed(torch.cat([x] * copies) if copies > 1 else x, tokens)

    def condition(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.model.condition(t, y)

    def forward_blocks(self, h, condition, attend, tokens=slice(None)) -> torch.Tensor:
        return self.model.head(
            self.model.transform(h, condition, attend, tokens, self.depth), condition
        )


@torch.inference_mode()
def overflows(network: Network, batch: Batch, device: torch.device, times: Sequence[float]) -> bool:
    """Return whether `network` returns infinities or NaN for noise at `times`."""
    # its own: the run's random stream begins untouched
    generator = torch.Generator(device).manual_seed(0)
    (n, copies) = batch.rows[0]
    shape = (network.in_channels, batch.side, batch.side)
    x = torch.randn(n, *shape, generator=generator, device=device)
    y = torch.arange(n, device=device) % batch.num_classes
    y = torch.cat([y, y.new_full((n * (copies - 1),), batch.num_classes)])  # the null label
    # On the rows of the run: other shapes would be compiled and tuned for nothing.
    outputs = (network.tokens(x, torch.full(y.shape, t, device=device), y) for t in times)
    return not all(out.isfinite().all() for out in outputs)


def remedy(network: Network, tier: str, device: torch.device) -> str:
    """Return the remedy, in words, for a tier whose values are not finite."""
    if layer := network.overflowed():
        return f"{layer} gives values beyond a high/low split; use `precision=fp32`"
    if tier == "fp16" and supports("bf16", device):
        return "use `precision=bf16`"
    return "check the weights" if tier == "fp32" else "use `precision=fp32`"
