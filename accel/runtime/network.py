"""The Network protocol: the interface of networks to the sampling loop and to ranks.

Accelerated networks (accel/fast), reference networks (EagerNetwork) and networks that are sharded
over ranks (accel/distributed) implement it. A network knows nothing about guidance.

    run = network.prepare(times, labels)    state of a sampling run: precomputed conditioning
    run.advance(i)                          before evaluation i
    network.forward(x, index, y, run)       an evaluation of the run, by its index
    network.forward(x, t, y)                an evaluation outside a run

Shapes: N batch rows, n latents (N is a multiple of n), C latent channels, H = W latent side,
p patch side, T = (H/p)² tokens, t tokens on this device, D width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from accel.errors import UsageError
from accel.runtime.graphs import CapturedGraph, GraphedFunction
from accel.runtime.stages import Stage, forward_stages, stages_of, unpatchify


class Batch(NamedTuple):
    """The network evaluations for which a network is compiled, tuned and checked."""

    # Every (latents, batch rows per latent) that a rank evaluates, largest first.
    rows: list[tuple[int, int]]
    side: int  # of latents
    num_classes: int
    columns: int = 1  # number of ranks that share the tokens of a row

    def row_tokens(self, patch_size: int) -> set[int]:
        """Return the numbers of tokens in GEMMs: of whole rows, as in the overflow check, and of a
        rank's part.
        """
        tokens = (self.side // patch_size) ** 2
        whole = {prod(rows) * tokens for rows in self.rows}
        return whole | {number // self.columns for number in whole}


class RunState(ABC):
    """The state of a sampling run, hashable.

    Two states are equal if a step captured with one is also correct for the other.
    """

    @abstractmethod
    def condition(self, index: Tensor, y: Tensor) -> Any:
        """Return the conditioning of the run's evaluations index (N,) for labels y (N,)."""

    def advance(self, index: int, *more: int) -> None:
        """Prepare the conditioning of these evaluations, which follow. Here: no-op."""
        return None


RunStateT = TypeVar("RunStateT")


class Network(ABC, Generic[RunStateT]):
    """A network that is ready to sample; `prepare` returns a RunStateT.

    Subclasses define `parts`, `prepare` and `graphed`, and `forward_tokens` or `forward`.
    """

    patch_size: int
    in_channels: int
    weights_label = "the weights"  # how errors name them
    captures = False  # whether the sampling loop captures a step as a CUDA graph

    @property
    @abstractmethod
    def parts(self) -> "list[BlockNetwork]":
        """Return the networks that have weights: this one, or network and guide."""

    def forward_tokens(
        self, x: Tensor, t: Tensor, y: Tensor, run: RunStateT | None = None
    ) -> Tensor:
        """Evaluate as `forward` does, but return tokens (N, T, p·p·C')."""
        raise NotImplementedError

    @torch.no_grad()
    def forward(self, x: Tensor, t: Tensor, y: Tensor, run: RunStateT | None = None) -> Tensor:
        """Evaluate x (n, C, H, W), repeated to N batch rows, at t (N,) for labels y (N,).

        run: a result of `prepare`; t then contains indices of its evaluations instead of times.
        Return (N, C', H, W) in x's dtype, as models.DiT.forward does.
        """
        return unpatchify(self.forward_tokens(x, t, y, run), self.patch_size).to(x.dtype)

    @abstractmethod
    def prepare(self, times: list[float], labels: list[int], at_once: int = 1) -> RunStateT:
        """Start a sampling run and return its state. The previous run's state becomes invalid.

        times: of all evaluations, in order. labels: all labels of the run. at_once: the maximum
        number of evaluations per call of `advance`.
        """

    @abstractmethod
    def graphed(self, key: Hashable, step: Callable) -> Callable:
        """Return `step` as a GraphedFunction; a network keeps a bounded number of graphs.

        key: represents everything that the step depends on except its arguments, also the run.
        """

    def tune(self, row_tokens: Iterable[int]) -> None:
        """Choose the fastest GEMM algorithms for each number of tokens of all batch rows.

        Here: no-op.
        """
        return None

    def overflowed(self) -> str | None:
        """Return the name of the first layer that overflowed, or None if none is known."""
        return None


class BlockNetwork(Network[RunState]):
    """A network of stages, whose batch rows or tokens can be sharded over ranks.

    attention(qkv, num_heads): packed (N, T, 3·D) → (N, T, D); all tokens are on this device.
    """

    stages: Sequence[Stage]
    attention: Callable

    def __init__(self) -> None:
        self.graphs: dict[Hashable, CapturedGraph] = {}

    @property
    def parts(self) -> "list[BlockNetwork]":
        return [self]

    @abstractmethod
    def parameters(self) -> Iterator[Tensor]:
        """Return all tensors that the network derives from the weights."""

    @torch.no_grad()
    def copy_weights(self, other: "BlockNetwork") -> None:
        """Copy the weights of another network with the same tier and shape, in place.

        Captured graphs stay valid.
        """
        for tensor, new in zip(self.parameters(), other.parameters(), strict=True):
            tensor.copy_(new)

    @abstractmethod
    def embed(self, x: Tensor, tokens: slice = slice(None), copies: int = 1) -> Tensor:
        """Embed latents (n, C, H, W) → tokens (copies·n, t, D), `copies` copies of the batch.

        tokens: the slice of each row to embed.
        """

    @abstractmethod
    def condition(self, t: Tensor, y: Tensor) -> Any:
        """Return the conditioning of timesteps t (N,) and labels y (N,)."""

    @abstractmethod
    def forward_blocks(
        self, h: Tensor, condition: Any, attend: Callable, tokens: slice = slice(None)
    ) -> Tensor:
        """Apply all stages and the head: h (N, t, D), which may be overwritten → (N, t, p·p·C').

        attend: `attention`, or attention to the tokens of all ranks. tokens: the slice of each row
        that h contains.
        """

    @torch.no_grad()
    def forward_tokens(
        self, x: Tensor, t: Tensor, y: Tensor, run: RunState | None = None
    ) -> Tensor:
        h = self.embed(x, copies=len(y) // len(x))  # (N, T, D)
        return self.forward_blocks(h, (run or self).condition(t, y), self.attention)

    def prepare(self, times: list[float], labels: list[int], at_once: int = 1) -> RunState:
        table = torch.tensor(times, device=next(self.parameters()).device)  # uploaded once
        return Times(self, tuple(times), table)

    def graphed(self, key: Hashable, step: Callable) -> Callable:
        return GraphedFunction(step, key, self.graphs)


@dataclass(frozen=True)
class Times(RunState):
    """The state of a run whose conditioning is computed at each evaluation."""

    network: BlockNetwork
    times: tuple[float, ...]
    table: Tensor = field(compare=False)  # `times` on the device

    def condition(self, index: Tensor, y: Tensor) -> Any:
        return self.network.condition(self.table[index], y)


class EagerNetwork(BlockNetwork):
    """A reference network, for the tiers fp32 and tf32.

    model: a module with `embed`, `condition`, `blocks` or `stages`, `transform`, `head`, `attend`.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        self.stages = stages_of(model)
        self.attention = model.attend
        self.patch_size = model.patch_size
        self.in_channels = model.in_channels

    def parameters(self) -> Iterator[Tensor]:
        return chain(self.model.parameters(), self.model.buffers())  # e.g. rotation tables

    def embed(self, x: Tensor, tokens: slice = slice(None), copies: int = 1) -> Tensor:
        return self.model.embed(torch.cat([x] * copies) if copies > 1 else x, tokens)

    def condition(self, t: Tensor, y: Tensor) -> Any:
        return self.model.condition(t, y)

    def forward_blocks(
        self, h: Tensor, condition: Any, attend: Callable, tokens: slice = slice(None)
    ) -> Tensor:
        return forward_stages(self.model, self.stages, h, condition, attend, tokens)


def require_no_gradients(reason: str, *inputs: Any) -> None:
    """Raise UsageError if an input needs gradients, in reverse or forward mode."""
    for value in filter(torch.is_tensor, inputs):
        reverse = value.requires_grad and torch.is_grad_enabled()
        if reverse or forward_ad.unpack_dual(value).tangent is not None:
            raise UsageError(f"gradients: {reason}, or use torch.no_grad() or .detach()")
