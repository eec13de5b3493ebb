"""The Network protocol: the interface between networks and the sampling loop or the ranks.

Accelerated networks (accel/fast), reference networks (EagerNetwork below) and networks that GPUs
share (accel/distributed) implement it. A network knows nothing of guidance.

    run = network.prepare(times, labels)    state of a sampling run: conditioning, computed ahead
    run.advance(i)                          before evaluation i
    network.forward(x, index, y, run)       evaluations of the run, by their indices
    network.forward(x, t, y)                any other evaluation

Shapes: N batch rows, n latents (N is a multiple of n), C latent channels, H = W latent side,
p patch side, T = (H/p)² tokens, t of them on this device, D width.
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

    # Every (latents, batch rows of each) that a rank evaluates, the most rows first.
    rows: list[tuple[int, int]]
    side: int  # of a latent
    num_classes: int
    columns: int = 1  # ranks that divide the tokens of a row

    def row_tokens(self, patch_size: int) -> set[int]:
        """Return the numbers of tokens in GEMMs: those of whole rows, which are checked for
        overflow, and of a rank's part of them.
        """
        tokens = (self.side // patch_size) ** 2
        whole = {prod(rows) * tokens for rows in self.rows}
        return whole | {number // self.columns for number in whole}


class RunState(ABC):
    """The state of a sampling run of a network, hashable. States are equal if a step captured with
    one serves the other: it finds the same numbers, at the addresses that it reads.
    """

    @abstractmethod
    def condition(self, index: Tensor, y: Tensor) -> Any:
        """Return the conditioning of the run's evaluations index (N,) for labels y (N,)."""

    def advance(self, index: int, *more: int) -> None:
        """Make the conditioning of these evaluations ready. Must precede them. Here: no-op."""
        return None


RunStateT = TypeVar("RunStateT")


class Network(ABC, Generic[RunStateT]):
    """A network that is ready to sample. Its runs have states of type `RunStateT`. Subclasses
    define `parts`, `prepare` and `graphed`, and `forward_tokens` or `forward`.
    """

    patch_size: int
    in_channels: int
    weights_label = "the weights"  # in words, with the options that name them
    captures = False  # whether the sampling loop captures a step as a CUDA graph

    @property
    @abstractmethod
    def parts(self) -> "list[BlockNetwork]":
        """Return the networks with weights of their own: itself, and its guide if there is one."""

    def forward_tokens(
        self, x: Tensor, t: Tensor, y: Tensor, run: RunStateT | None = None
    ) -> Tensor:
        """Evaluate as `forward` does, and return the last tokens (N, T, p·p·C')."""
        raise NotImplementedError

    @torch.no_grad()
    def forward(self, x: Tensor, t: Tensor, y: Tensor, run: RunStateT | None = None) -> Tensor:
        """Evaluate x (n, C, H, W), repeated to N batch rows, at t (N,) for labels y (N,).

        run: the state of a run, of `prepare`; t are then indices of its evaluations, and times
        without it. Returns (N, C', H, W) in x's dtype, as models.DiT.forward does.
        """
        return unpatchify(self.forward_tokens(x, t, y, run), self.patch_size).to(x.dtype)

    @abstractmethod
    def prepare(self, times: list[float], labels: list[int], at_once: int = 1) -> RunStateT:
        """Begin a sampling run and return its state. The run before has ended.

        times: of each evaluation, in order; labels: all of them; at_once: the most evaluations
        in one call of `advance`.
        """

    @abstractmethod
    def graphed(self, key: Hashable, step: Callable) -> Callable:
        """Return `step`, captured as CUDA graphs, of which a network keeps few.

        key: all that the step depends on apart from its arguments, the state of its run included.
        """

    def tune(self, row_tokens: Iterable[int]) -> None:
        """Choose the fastest GEMMs for each of `row_tokens`, batch rows × tokens of a row.

        Here: no-op.
        """
        return None

    def overflowed(self) -> str | None:
        """Return the first layer whose values left the number format's range, or None."""
        return None


class BlockNetwork(Network[RunState]):
    """A network of stages of transformer blocks, which ranks can share by batch rows or tokens.

    attention(qkv, num_heads): packed (N, T, 3·D) → (N, T, D), all tokens on this device.
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
        """Return all tensors that depend on the weights, as the network computes with them."""

    @torch.no_grad()
    def copy_weights(self, other: "BlockNetwork") -> None:
        """Copy the weights of a network of the same tier and shape in place.

        Captured graphs stay valid.
        """
        for tensor, new in zip(self.parameters(), other.parameters(), strict=True):
            tensor.copy_(new)

    @abstractmethod
    def embed(self, x: Tensor, tokens: slice = slice(None), copies: int = 1) -> Tensor:
        """Embed latents (n, C, H, W) → tokens (copies·n, t, D), the batch `copies` times.

        tokens: the slice of each row to embed. A network whose stages have embeddings of their own
        returns them side by side.
        """

    @abstractmethod
    def condition(self, t: Tensor, y: Tensor) -> Any:
        """Return the conditioning of timesteps t (N,) and labels y (N,)."""

    @abstractmethod
    def forward_blocks(
        self, h: Tensor, condition: Any, attend: Callable, tokens: slice = slice(None)
    ) -> Tensor:
        """Apply all stages and the head: h (N, t, D), which may be overwritten → (N, t, p·p·C').

        attend: `attention`, or an exchange with other devices' tokens. tokens: the slice of each
        row that h holds.
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
    """The state of a run whose conditioning is computed at each evaluation, from its time."""

    network: BlockNetwork
    times: tuple[float, ...]
    table: Tensor = field(compare=False)  # the times, on the device

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
        return chain(self.model.parameters(), self.model.buffers())  # such as tables of rotations

    def embed(self, x: Tensor, tokens: slice = slice(None), copies: int = 1) -> Tensor:
        return self.model.embed(torch.cat([x] * copies) if copies > 1 else x, tokens)

    def condition(self, t: Tensor, y: Tensor) -> Any:
        return self.model.condition(t, y)

    def forward_blocks(
        self, h: Tensor, condition: Any, attend: Callable, tokens: slice = slice(None)
    ) -> Tensor:
        return forward_stages(self.model, self.stages, h, condition, attend, tokens)


def require_no_gradients(reason: str, *inputs: Any) -> None:
    """Raise UsageError, with a reason and a remedy, if an input is differentiated, in reverse or
    forward mode.
    """
    for value in filter(torch.is_tensor, inputs):
        reverse = value.requires_grad and torch.is_grad_enabled()
        if reverse or forward_ad.unpack_dual(value).tangent is not None:
            raise UsageError(f"gradients: {reason}, or use torch.no_grad() or .detach()")
