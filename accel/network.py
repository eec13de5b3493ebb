"""The Network protocol: all that the sampling loop and the ranks know of a network.

An accelerated network (accel/fast), a reference model (Plain below) and a network that several GPUs share
(accel/parallel) all look alike from outside. A network knows nothing of guidance: its batch rows are rows like others.

Shapes: N batch rows, n latents (N is a multiple of n), C latent channels, H = W latent side, p patch side,
T = (H/p)² tokens, D width.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from accel.graphs import Latest, Replayed

KEPT = 4  # captured moves: of another guidance or number of steps, each is another


def unpatchify(tokens: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Tokens (N, T, p·p·C) of a square picture → (N, C, H, W); inside a token the order is (p, p, C)."""
    side, p = round(tokens.shape[1] ** 0.5), patch_size
    x = tokens.unflatten(-1, (p, p, -1)).unflatten(1, (side, side))  # (N, side, side, p, p, C)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(len(x), -1, side * p, side * p)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DataParallel, DistributedDataParallel and torch.compile."""
    wrappers = torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel
    while isinstance(model, wrappers) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, wrappers) else model._orig_mod
    return model


class Part(NamedTuple):
    """The part of every GEMM's weights that a rank holds: heads and hidden width are divided (Shoeybi et al. 2019,
    arXiv:1909.08053, section 3)."""

    rank: int = 0
    ranks: int = 1
    all_reduce: Callable[[torch.Tensor], object] | None = None  # sums a tensor over the ranks, in place
    group: Any = None  # the ranks' process group; None on a rank that is left idle

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x, summed over the ranks in place."""
        if self.ranks > 1:
            self.all_reduce(x)
        return x


WHOLE = Part()


class Network(ABC):
    """A network that is ready to sample. A subclass gives `tokens` and `schedule`; the rest has defaults."""

    patch_size: int
    in_channels: int
    captures = False  # whether the sampling loop should record a move as a CUDA graph
    fuses_update = False  # whether a step may end by kernels.ancestral_update on `tokens`

    def __init__(self):
        self._replayed = Latest(KEPT)

    @abstractmethod
    def tokens(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x (n, C, H, W), t (N,), y (N,) → the last layer's tokens (N, T, p·p·C'). N is a multiple of n: the latents
        are repeated."""

    @torch.no_grad()
    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """As models.DiT.forward: x (n, C, H, W), t (N,), y (N,) → (N, C', H, W) in x's dtype."""
        return unpatchify(self.tokens(x, t, y), self.patch_size).to(x.dtype)

    @abstractmethod
    def schedule(
        self, times: list[float], labels: list[int], at_once: int = 1
    ) -> tuple["Network", Callable[..., None]]:
        """A sampling run is about to begin → (this network, which takes the index of an evaluation for its time;
        `advance`). advance(i, …) has to come before the evaluations i, … of the run.

        times: of each evaluation, in order; labels: all that occur; at_once: the most evaluations that one call of
        `advance` announces. Another run may follow, and not at the same time.
        """

    def replayed(self, key: Hashable, step: Callable) -> Callable:
        """`step` as a CUDA graph, kept under `key`: of steps with equal keys the first is kept and serves all. Each
        holds memory: only the KEPT that were used last are kept."""
        return self._replayed.obtain(key, lambda: Replayed(step))

    def tune(self, row_tokens: Iterable[int]) -> None:
        """Choose the fastest GEMMs for each of `row_tokens`: batch rows × tokens of a row. Here: nothing to choose."""
        return None

    def overflowed(self) -> str | None:
        """The first layer whose values left the range of the number format, in any evaluation so far, or None."""
        return None


class BlockNetwork(Network):
    """A network of transformer blocks, which ranks can share by batch rows or by tokens.

    attention(qkv, num_heads): its own attention, packed (N, T, 3·D) → (N, T, D), for tokens that are all on this
    device. exchanges: names of the token exchanges (accel/parallel/exchanges.py) that keep its accuracy, the fastest
    first.
    """

    depth: int
    width: int
    num_heads: int
    dtype: torch.dtype
    attention: Callable
    exchanges = ("push", "kv", "ulysses")

    @abstractmethod
    def parameters(self) -> Iterator[torch.Tensor]:
        """All tensors that depend on the weights, in the layout and precision that they are computed with."""

    @torch.no_grad()
    def exchange(self, other: "BlockNetwork") -> None:
        """Exchange the weights with those of another network of the same tier, in place: what was captured of either
        stays valid. A sampling run computes its conditioning afresh. Raises ValueError for one of another shape."""
        pairs = list(zip_longest(self.parameters(), other.parameters()))
        alike = all(None not in pair and pair[0].shape == pair[1].shape for pair in pairs)
        if not alike or self.num_heads != other.num_heads:
            raise ValueError("weights of another shape: depth, width, heads, patch, classes and channels must be equal")
        for own, new in pairs:
            kept = own.clone()
            own.copy_(new)
            new.copy_(kept)

    @abstractmethod
    def embed(self, x: torch.Tensor, tokens: slice = slice(None), copies: int = 1) -> torch.Tensor:
        """Latents (n, C, H, W) → the part `tokens` of their tokens (copies·n, t, D), the batch `copies` times over."""

    @abstractmethod
    def condition(self, t: torch.Tensor, y: torch.Tensor) -> Any:
        """What the blocks need to know of timesteps t (N,) and labels y (N,)."""

    @abstractmethod
    def forward_blocks(
        self, h: torch.Tensor, condition: Any, attend: Callable, tokens: slice = slice(None)
    ) -> torch.Tensor:
        """All blocks and the final layer: h (N, t, D), which may be overwritten → (N, t, p·p·C').

        attend: `attention`, or an exchange where the other tokens are on other devices. tokens: which tokens of each
        row h holds.
        """

    def shallow(self, depth: int) -> "BlockNetwork":
        """This network with its first `depth` blocks only, sharing the weights; for measurements."""
        network = copy.copy(self)
        network.depth, network._replayed = depth, Latest(KEPT)
        return network

    def describe(self) -> str:
        """What its speed depends on, in words. A kept measurement is looked up by it."""
        return f"{type(self).__name__} of {self.depth} blocks of {self.width}, {self.dtype}"

    @torch.no_grad()
    def tokens(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x, copies=len(y) // len(x))  # (N, T, D)
        return self.forward_blocks(h, self.condition(t, y), self.attention)

    def schedule(self, times: list[float], labels: list[int], at_once: int = 1) -> tuple[Network, Callable[..., None]]:
        table = torch.tensor(times, device=next(self.parameters()).device)  # uploaded once
        return self.conditioned(lambda index, y: self.condition(table[index], y)), lambda *evaluations: None

    def conditioned(self, condition: Callable[[torch.Tensor, torch.Tensor], Any]) -> "BlockNetwork":
        """This network with another `condition`."""
        network = copy.copy(self)
        network.condition = condition
        return network


class Plain(BlockNetwork):
    """A reference network behind the protocol, tiers fp32 and tf32: a module that shows `embed`, `condition`, `blocks`,
    `transform`, `head` and `attend`."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.attention = model.attend
        self.model, self.depth, self.num_heads = model, len(model.blocks), model.num_heads
        self.patch_size, self.in_channels = model.patch_size, model.in_channels
        self.width = next(model.blocks[0].parameters()).shape[-1]  # of a block's first layer

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def parameters(self) -> Iterator[torch.Tensor]:
        return self.model.parameters()

    def embed(self, x: torch.Tensor, tokens: slice = slice(None), copies: int = 1) -> torch.Tensor:
        return self.model.embed(torch.cat([x] * copies) if copies > 1 else x, tokens)

    def condition(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.model.condition(t, y)

    def forward_blocks(self, h, condition, attend, tokens=slice(None)) -> torch.Tensor:
        return self.model.head(self.model.transform(h, condition, attend, tokens, self.depth), condition)
