"""The Network protocol: all that the sampler, the engine and the ranks know of a network.

Guidance and unpatchify are written here, once for every network. An accelerated network (accel/fast), a reference model
(PlainDiT, PlainLargeDiT below) and a network that several GPUs share (accel/parallel) all look alike from outside.

Shapes: N batch rows, n latents (N is n, or 2n with guidance), C latent channels, H = W latent side, p patch side,
T = (H/p)² tokens, D width.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch

from accel.graphs import Replayed
from large_dit import DiT_Llama, Large_DiT_models, patchify
from models import DiT, DiT_models, attention

MODELS = {**DiT_models, **Large_DiT_models}  # every name that --model takes → its constructor
KEPT = 4  # captured steps: of another guidance or number of steps, each is another
GUIDED_CHANNELS = 3  # of the noise estimate; the published pictures were made so


def unpatchify(tokens: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Tokens (N, T, p·p·C) of a square picture → (N, C, H, W); inside a token the order is (p, p, C)."""
    side, p = round(tokens.shape[1] ** 0.5), patch_size
    x = tokens.unflatten(-1, (p, p, -1)).unflatten(1, (side, side))  # (N, side, side, p, p, C)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(len(x), -1, side * p, side * p)


def guide(out: torch.Tensor, cfg_scale: float | torch.Tensor) -> torch.Tensor:
    """Classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598) on the first three channels of out.

    out (2n, C', H, W): the first n rows are conditional, the others not. Both halves get
    uncond + cfg_scale · (cond − uncond); the other channels pass.
    """
    eps, rest = out[:, :GUIDED_CHANNELS], out[:, GUIDED_CHANNELS:]
    cond, uncond = eps.chunk(2)  # each (n, 3, H, W)
    guided = uncond + cfg_scale * (cond - uncond)
    return torch.cat([torch.cat([guided, guided]), rest], dim=1)


def rows_of_a_latent(batch_rows: int, guided: bool) -> int:
    """How many batch rows of an evaluation share a latent: with guidance two, but in a part that ranks divide."""
    return 2 if guided and batch_rows % 2 == 0 else 1


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DataParallel, DistributedDataParallel and torch.compile."""
    wrappers = torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel
    while isinstance(model, wrappers) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, wrappers) else model._orig_mod
    return model


class Network(ABC):
    """A network that is ready to sample. A subclass gives `tokens`; the rest has defaults."""

    patch_size: int
    in_channels: int
    captures = False  # whether the sampler should record a step as a CUDA graph
    fuses_update = False  # whether the sampler should end a step by kernels.ancestral_update on `tokens`

    def __init__(self):
        self._replayed = {}

    @abstractmethod
    def tokens(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x (n, C, H, W), t (N,), y (N,) → the last layer's tokens (N, T, p·p·C'). N is a multiple of n: the latents
        are repeated."""

    @torch.no_grad()
    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """As models.DiT.forward: x (N, C, H, W), t (N,), y (N,) → (N, C', H, W) in x's dtype."""
        return unpatchify(self.tokens(x, t, y), self.patch_size).to(x.dtype)

    @torch.no_grad()
    def forward_with_cfg(
        self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor, cfg_scale: float | torch.Tensor
    ) -> torch.Tensor:
        """As models.DiT.forward_with_cfg: x (2n, C, H, W), of which the first n rows are read; t, y (2n,). cfg_scale: a
        number, or on x's device a tensor ()."""
        out = unpatchify(self.tokens(x[: len(x) // 2], t, y), self.patch_size)
        return guide(out, cfg_scale).to(x.dtype)

    @contextmanager
    def sampling_run(self, timesteps: list[int], labels: list[int], at_once: int = 1) -> Iterator[Callable[..., None]]:
        """The sampler's loop runs inside. Yields `advance`; advance(i, …) comes before evaluations i, … of the run.

        timesteps: of each evaluation, in order (original timesteps); labels: all that occur, the null label included;
        at_once: the most evaluations that one call of `advance` announces. Inside, only these may be evaluated.
        """
        yield lambda *evaluations: None

    def replayed(self, key: Any, step: Callable) -> Callable:
        """`step` as a CUDA graph, kept under `key`: of steps with equal keys the first is kept and serves all. Each
        holds memory: only the KEPT that were used last are kept."""
        replayed = self._replayed.pop(key, None) or Replayed(step)
        self._replayed = {**dict(list(self._replayed.items())[1 - KEPT :]), key: replayed}
        return replayed

    def tune(self, row_tokens: Iterable[int], share: Callable[[Callable[[], Any]], Any]) -> None:
        """Choose the fastest GEMMs for each of `row_tokens`: batch rows × tokens of a row. Here: nothing to choose.

        share(make): what `make()` returns on rank 0, on every rank; so all ranks choose alike.
        """
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
        self,
        h: torch.Tensor,
        condition: Any,
        *,
        attend: Callable | None = None,
        tokens: slice = slice(None),
    ) -> torch.Tensor:
        """All blocks and the final layer: h (N, t, D), which may be overwritten → (N, t, p·p·C').

        attend: replaces `attention` (an exchange, where the other tokens are on other devices). tokens: which tokens
        of each row h holds.
        """

    def shallow(self, depth: int) -> "BlockNetwork":
        """This network with its first `depth` blocks only, sharing the weights; for measurements."""
        network = copy.copy(self)
        network.depth, network._replayed = depth, {}
        return network

    def describe(self) -> str:
        """What its speed depends on, in words. A kept measurement is looked up by it."""
        return f"{type(self).__name__} of {self.depth} blocks of {self.width}, {self.dtype}"

    @torch.no_grad()
    def tokens(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x, copies=len(y) // len(x))  # (N, T, D)
        return self.forward_blocks(h, self.condition(t, y))


class Plain(BlockNetwork):
    """A reference module behind the protocol: tiers fp32 and tf32. A subclass gives `embed` and `forward_blocks`."""

    attention = staticmethod(attention)

    def __init__(self, model: torch.nn.Module, blocks: torch.nn.ModuleList, num_heads: int, width: int):
        super().__init__()
        self.model, self.blocks, self.num_heads, self.width = model, blocks, num_heads, width
        self.depth, self.patch_size, self.in_channels = len(blocks), model.patch_size, model.in_channels

    def parameters(self) -> Iterator[torch.Tensor]:
        return self.model.parameters()

    @property
    def dtype(self) -> torch.dtype:
        return self.model.final_layer.linear.weight.dtype

    def condition(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.model.t_embedder(t) + self.model.y_embedder(y, False)  # (N, C)


class PlainDiT(Plain):
    """models.DiT."""

    def __init__(self, model: DiT):
        super().__init__(model, model.blocks, model.num_heads, model.pos_embed.shape[-1])

    def embed(self, x: torch.Tensor, tokens: slice = slice(None), copies: int = 1) -> torch.Tensor:
        x = torch.cat([x] * copies) if copies > 1 else x
        return (self.model.x_embedder(x) + self.model.pos_embed)[:, tokens]

    def forward_blocks(self, h, condition, *, attend=None, tokens=slice(None)) -> torch.Tensor:
        for block in self.blocks[: self.depth]:
            h = block(h, condition, attend or self.attention)
        return self.model.final_layer(h, condition)


class PlainLargeDiT(Plain):
    """large_dit.DiT_Llama."""

    def __init__(self, model: DiT_Llama):
        super().__init__(model, model.layers, model.n_heads, model.dim)

    def embed(self, x: torch.Tensor, tokens: slice = slice(None), copies: int = 1) -> torch.Tensor:
        x = torch.cat([x] * copies) if copies > 1 else x
        return self.model.x_embedder(patchify(x, self.patch_size)[:, tokens])

    def forward_blocks(self, h, condition, *, attend=None, tokens=slice(None)) -> torch.Tensor:
        rotation = self.model.rotation(h)[tokens]  # (t, d/2, 2)
        for block in self.blocks[: self.depth]:
            h = block(h, condition, rotation, attend or self.attention)
        return self.model.final_layer(h, condition)


PLAIN = {DiT: PlainDiT, DiT_Llama: PlainLargeDiT}


def plain(model: torch.nn.Module) -> Plain:
    """A module of MODELS behind the protocol."""
    return PLAIN[type(model)](model)
