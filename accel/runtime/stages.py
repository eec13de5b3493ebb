"""Stages: all networks have the structure embed → stage → … → head.

Shapes: N batch rows, C' output channels, H = W latent side, p patch side, T = (H/p)² tokens, t
tokens on this device, D width.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Stage(NamedTuple):
    """Consecutive blocks of one width and one number of tokens.

    Most networks have one stage, with the default `enter` and `modulate`.

    enter(x, embedded, condition): returns the input tokens (N, t, D) of the first block. x: tokens
    of the previous stage, or the embedded tokens for the first stage. embedded, condition: results
    of the network's `embed` and `condition`. Blocks may overwrite x; if a later stage reads
    `embedded`, the first stage must copy it. Default: x.
    modulate(x, condition): returns the modulation of the blocks and, for the last stage, of the
    head. x: as for `enter`. Default: the network's conditioning, one vector per batch row.
    """

    blocks: Sequence[Any]  # modules of a reference network, or blocks of accel/fast
    width: int
    num_heads: int
    enter: Callable[[Tensor, Tensor, Any], Tensor] = lambda x, embedded, condition: x
    modulate: Callable[[Tensor, Any], Any] = lambda x, condition: condition
    prepended: int = 0  # number of additional tokens before the patches'; the head drops them


def stages_of(model: Any) -> list[Stage]:
    """Return the stages of a reference network: its `stages`, or one stage of its `blocks`."""
    if hasattr(model, "stages"):
        return list(model.stages)
    weight = next(model.blocks[0].parameters())  # of the first layer
    return [Stage(list(model.blocks), weight.shape[-1], model.num_heads)]


def forward_stages(
    model: Any,
    stages: Sequence[Stage],
    h: Tensor,
    condition: Any,
    attend: Callable,
    tokens: slice = slice(None),
) -> Tensor:
    """Apply the stages and the head of a reference network: h (N, t, D) → (N, t, p·p·C').

    model: a module with `transform` and `head`. h, condition: results of its `embed` and
    `condition`. attend: its `attend`, or attention to the tokens of all ranks. tokens: the slice of
    each row that h contains.
    """
    x = h
    for stage in stages:
        modulation = stage.modulate(x, condition)
        x = stage.enter(x, h, condition)  # (N, t, D)
        x = model.transform(x, modulation, attend, tokens, stage.blocks)
    return model.head(x[:, stage.prepended :], modulation)


def unpatchify(tokens: Tensor, patch_size: int) -> Tensor:
    """Assemble the tokens (N, T, p·p·C') of a square picture → (N, C', H, W).

    The order inside a token is (p, p, C').
    """
    side = round(tokens.shape[1] ** 0.5)
    p = patch_size
    x = tokens.unflatten(-1, (p, p, -1)).unflatten(1, (side, side))  # (N, side, side, p, p, C')
    return x.permute(0, 5, 1, 3, 2, 4).reshape(len(x), -1, side * p, side * p)
