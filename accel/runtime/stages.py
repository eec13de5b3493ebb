"""Stages: embed → stage → … → head, the form of all networks.

Shapes: N batch rows, C' channels of the output, H = W side, p patch side, T = (H/p)² tokens, t of
them on this device, D width.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor


def keep_tokens(x: Tensor, embedded: Tensor, condition: Any) -> Tensor:
    """Let a stage's tokens enter as the stage before returns them, or as they were embedded."""
    return x


def keep_condition(x: Tensor, condition: Any) -> Any:
    """Modulate a stage's blocks by the network's conditioning, a vector a batch row."""
    return condition


class Stage(NamedTuple):
    """Consecutive blocks of one width and one number of tokens.

    Most networks have one stage. The defaults of `enter` and `modulate` are for that one.

    enter(x, embedded, condition): returns the tokens (N, t, D) on which the blocks begin. x: the
    tokens of the stage before, in the first stage the embedded ones; embedded: those of the
    network's `embed`; condition: of its `condition`. A stage that others follow may overwrite x, so
    a function that reads `embedded` later has the first stage copy it.
    modulate(x, condition): returns what modulates the blocks and, after the last stage, the head;
    x as for `enter`.
    """

    blocks: Sequence[Any]  # modules of a reference network, or blocks of accel/fast
    width: int
    num_heads: int
    enter: Callable[[Tensor, Tensor, Any], Tensor] = keep_tokens
    modulate: Callable[[Tensor, Any], Any] = keep_condition
    prepended: int = 0  # tokens in front of the picture's; the head drops them


def stages_of(model: Any) -> list[Stage]:
    """Return the stages of a reference network: its `stages`, or one stage of its `blocks`."""
    if hasattr(model, "stages"):
        return list(model.stages)
    weight = next(model.blocks[0].parameters())  # of the block's first layer
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

    model: a module with `transform` and `head`. h, condition: of its `embed` and `condition`.
    attend: its `attend`, or an exchange with other devices' tokens. tokens: the slice of each row
    that h holds.
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
