"""The Network protocol: the interface between networks and the sampling loop or the ranks.

Accelerated networks (accel/fast), reference models (Plain below) and networks that GPUs share
(accel/ranks) implement it. A network knows nothing of guidance.

Shapes: N batch rows, n latents (N is a multiple of n), C latent channels, H = W latent side,
p patch side, T = (H/p)² tokens, t of them on this device, D width.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from accel.errors import UsageError

KEPT = 4  # graphs kept, one per (process, guidance)


def unpatchify(tokens: Tensor, patch_size: int) -> Tensor:
    """Assemble the tokens (N, T, p·p·C) of a square picture → (N, C, H, W).

    The order inside a token is (p, p, C).
    """
    side = round(tokens.shape[1] ** 0.5)
    p = patch_size
    x = tokens.unflatten(-1, (p, p, -1)).unflatten(1, (side, side))  # (N, side, side, p, p, C)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(len(x), -1, side * p, side * p)


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


# ---- Stages ----


def tokens_as_they_are(x: Tensor, embedded: Tensor, condition: Any) -> Tensor:
    """Let a stage's tokens enter as the stage before returns them, or as they were embedded."""
    return x


def vectors_of_rows(x: Tensor, condition: Any) -> Any:
    """Modulate a stage's blocks by the network's conditioning, a vector a batch row."""
    return condition


class Stage(NamedTuple):
    """Consecutive blocks of one width and one number of tokens.

    A network is embed → stage → … → head; most networks have one stage. The defaults of
    `enter` and `modulate` are for that one.

    enter(x, embedded, condition): returns the tokens (N, t, D) on which the blocks begin. x: the
    tokens of the stage before, in the first stage the embedded ones; embedded: those of
    `BlockNetwork.embed`; condition: of `BlockNetwork.condition`. A stage that others follow may
    overwrite x, so a function that reads `embedded` later has the first stage copy it.
    modulate(x, condition): returns what modulates the blocks and, after the last stage, the head;
    x as for `enter`.
    """

    blocks: Sequence[Any]  # modules of a reference network, or blocks of accel/fast
    width: int
    num_heads: int
    enter: Callable[[Tensor, Tensor, Any], Tensor] = tokens_as_they_are
    modulate: Callable[[Tensor, Any], Any] = vectors_of_rows
    prepended: int = 0  # tokens in front of the picture's; the head drops them


def stages_of(model: Any) -> list[Stage]:
    """Return the stages of a reference network: its `stages`, or one stage of its `blocks`."""
    if hasattr(model, "stages"):
        return list(model.stages)
    weight = next(model.blocks[0].parameters())  # of the block's first layer
    return [Stage(list(model.blocks), weight.shape[-1], model.num_heads)]


# ---- Networks ----


class Network(ABC):
    """A network that is ready to sample. Subclasses define `schedule`, and `tokens` or
    `forward`.
    """

    patch_size: int
    in_channels: int
    of_files = "the weights"  # in words, with the options that name them
    captures = False  # whether the sampling loop captures a step as a CUDA graph

    def __init__(self):
        self._replayed: dict[Hashable, Any] = {}

    def tokens(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Evaluate x (n, C, H, W), repeated to N batch rows, at t (N,), y (N,).

        Returns the last tokens (N, T, p·p·C').
        """
        raise NotImplementedError

    @torch.no_grad()
    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Evaluate as models.DiT.forward does.

        x (n, C, H, W), t (N,), y (N,) → (N, C', H, W) in x's dtype.
        """
        return unpatchify(self.tokens(x, t, y), self.patch_size).to(x.dtype)

    @abstractmethod
    def schedule(self, times: list[float], labels: list[int], at_once: int = 1) -> "Scheduled":
        """Prepare a sampling run.

        times: of each evaluation, in order; labels: all of them; at_once: the most evaluations
        in one call of `advance`. One run at a time.
        """

    def replayed(self, key: Hashable, step: Callable) -> Callable:
        """Return `step` as a CUDA graph.

        The first step of a key serves all later ones; the last KEPT keys are kept.
        """
        from accel.graphs import Replayed, obtain  # a CPU needs none

        return obtain(self._replayed, key, lambda: Replayed(step), KEPT)

    def tune(self, row_tokens: Iterable[int]) -> None:
        """Choose the fastest GEMMs for each of `row_tokens`, batch rows × tokens of a row.

        Here: no-op.
        """
        return None

    def overflowed(self) -> str | None:
        """Return the first layer whose values left the number format's range, or None."""
        return None


class Scheduled(NamedTuple):
    """A network that is prepared for a sampling run.

    network: its t is the index of an evaluation. advance(i, …) must precede the evaluations i, …
    of the run.
    """

    network: Network
    advance: Callable[..., None]


class BlockNetwork(Network):
    """A network of stages of transformer blocks, which ranks can share by batch rows or tokens.

    attention(qkv, num_heads): packed (N, T, 3·D) → (N, T, D), all tokens on this device.
    """

    stages: Sequence[Stage]
    attention: Callable

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
    def tokens(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x, copies=len(y) // len(x))  # (N, T, D)
        return self.forward_blocks(h, self.condition(t, y), self.attention)

    def schedule(self, times: list[float], labels: list[int], at_once: int = 1) -> Scheduled:
        table = torch.tensor(times, device=next(self.parameters()).device)  # uploaded once
        scheduled = self.conditioned(lambda index, y: self.condition(table[index], y))
        return Scheduled(scheduled, lambda *evaluations: None)

    def conditioned(self, condition: Callable[[Tensor, Tensor], Any]) -> "BlockNetwork":
        """Return this network with another `condition`."""
        network = copy.copy(self)
        vars(network)["condition"] = condition  # hides the method
        return network


class Plain(BlockNetwork):
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
        return self.model.parameters()

    def embed(self, x: Tensor, tokens: slice = slice(None), copies: int = 1) -> Tensor:
        return self.model.embed(torch.cat([x] * copies) if copies > 1 else x, tokens)

    def condition(self, t: Tensor, y: Tensor) -> Tensor:
        return self.model.condition(t, y)

    def forward_blocks(self, h, condition, attend, tokens=slice(None)) -> Tensor:
        x = h
        for stage in self.stages:
            modulation = stage.modulate(x, condition)
            x = stage.enter(x, h, condition)  # (N, t, D)
            x = self.model.transform(x, modulation, attend, tokens, stage.blocks)
        return self.model.head(x[:, stage.prepended :], modulation)


def require_no_gradients(reason: str, *inputs: Any) -> None:
    """Raise UsageError, with a reason and a remedy, if an input is differentiated, in reverse or
    forward mode.
    """
    for value in filter(torch.is_tensor, inputs):
        reverse = value.requires_grad and torch.is_grad_enabled()
        if reverse or forward_ad.unpack_dual(value).tangent is not None:
            raise UsageError(f"gradients: {reason}, or use torch.no_grad() or .detach()")
