"""JiT: Li & He 2025, "Back to Basics: Let Denoising Generative Models Denoise", arXiv:2511.13720.

LightningDiT's block with normalised queries and keys, on large patches of pixels. From block k on
label tokens stand in front of the picture tokens. The output is an estimate of the clean picture.
Names and state-dict keys match the published checkpoints.

Shapes: N batch, T picture tokens, F label tokens in front, D width, h heads, d head dim.
"""

from collections import OrderedDict
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from accel.families.blocks import (
    RMSFinalLayer,
    RotaryBlock,
    RotaryTransformer,
    grid_rotation_table,
    wide_dtype,
)
from accel.families.dit.network import (
    LabelEmbedder,
    TimestepEmbedder,
    constructor,
    position_embedding,
)
from accel.runtime.stages import Stage, forward_stages


class Condition(NamedTuple):
    """The conditioning of batch rows."""

    vector: Tensor  # (N, D), of timestep and label
    label: Tensor  # (N, D), the label's embedding


def rotations(
    head_dim: int, side: int, front: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Return cosines and sines (F + T, d/2, 2). The first `front` tokens are not rotated; picture
    tokens are, by row and column.
    """
    table = grid_rotation_table(head_dim, side, dtype, device)  # (T, d/2, 2)
    identity = torch.zeros_like(table[:1]).expand(front, -1, -1).clone()
    identity[..., 0] = 1
    return torch.cat([identity, table])


class JiT(RotaryTransformer):
    """Estimate the clean picture: x (N, C, H, W), t (N,), y (N,) → (N, C, H, W).

    t runs from 0, noise, to 1, data. in_context_len: the number of label tokens.
    in_context_start: the first block with label tokens.
    """

    def __init__(
        self,
        input_size: int = 256,
        patch_size: int = 16,
        in_channels: int = 3,
        hidden_size: int = 1024,
        depth: int = 24,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        class_dropout_prob: float = 0.1,
        num_classes: int = 1000,
        learn_sigma: bool = False,
        bottleneck_dim: int = 128,
        in_context_len: int = 32,
        in_context_start: int = 8,
    ):
        down = nn.Conv2d(in_channels, bottleneck_dim, patch_size, stride=patch_size, bias=False)
        up = nn.Conv2d(bottleneck_dim, hidden_size, 1)
        super().__init__(
            patch_size,
            in_channels,
            learn_sigma,
            nn.Sequential(OrderedDict(proj1=down, proj2=up)),
            TimestepEmbedder(hidden_size),
            LabelEmbedder(num_classes, hidden_size, class_dropout_prob),
        )
        self.num_heads = num_heads
        self.in_context_len = in_context_len
        self.in_context_start = in_context_start
        self.side = input_size // patch_size  # of the grid of tokens
        self.pos_embed = position_embedding(self.side, hidden_size)
        label_positions = torch.empty(1, in_context_len, hidden_size)
        self.in_context_posemb = nn.Parameter(label_positions.normal_(std=0.02))
        self.blocks = nn.ModuleList(
            RotaryBlock(hidden_size, num_heads, mlp_ratio, qk_norm=True) for _ in range(depth)
        )
        self.final_layer = RMSFinalLayer(hidden_size, patch_size, self.out_channels)
        self.initialize_weights()

    def embed(self, x: Tensor, tokens: slice = slice(None)) -> Tensor:
        """Embed pictures (N, C, H, W) by two projections, with positions → (N, T, D)."""
        return (self.x_embedder(x).flatten(2).mT + self.pos_embed)[:, tokens]

    @property
    def stages(self) -> list[Stage]:
        """Return two stages: the blocks without and the blocks with label tokens."""
        blocks = list(self.blocks)
        without_label = Stage(
            blocks[: self.in_context_start],
            self.pos_embed.shape[-1],
            self.num_heads,
            modulate=lambda x, condition: condition.vector,
        )
        with_label = without_label._replace(
            blocks=blocks[self.in_context_start :],
            enter=self.prepend_label,
            prepended=self.in_context_len,
        )
        return [without_label, with_label]

    def condition(self, t: Tensor, y: Tensor) -> Condition:  # type: ignore[override]
        """Return the conditioning of timesteps t (N,) and labels y (N,)."""
        label = self.y_embedder(y, self.training)
        return Condition(self.t_embedder(t) + label, label)

    def prepend_label(self, x: Tensor, embedded: Tensor, condition: Condition) -> Tensor:
        """Put the label tokens in front of x (N, T, D) → (N, F + T, D)."""
        front = condition.label[:, None] + self.in_context_posemb  # (N, F, D)
        return torch.cat([front, x], dim=1)

    def rotation(self, x: Tensor, tokens: slice) -> Tensor:
        """Return the rotations (F + T, d/2, 2) of whole rows x; F is 0 in the first stage."""
        front = x.shape[1] - self.side**2
        head_dim = x.shape[-1] // self.num_heads
        return rotations(head_dim, self.side, front, wide_dtype(x), x.device)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Estimate the clean picture: x (N, C, H, W), t (N,), y (N,) → (N, C, H, W)."""
        c = self.condition(t, y)
        return self.unpatchify(forward_stages(self, self.stages, self.embed(x), c, self.attend))


# ---- Configurations ----

_SIZES = {
    "B": dict(depth=12, hidden_size=768, num_heads=12, bottleneck_dim=128, in_context_start=4),
    "L": dict(depth=24, hidden_size=1024, num_heads=16, bottleneck_dim=128, in_context_start=8),
    "H": dict(depth=32, hidden_size=1280, num_heads=16, bottleneck_dim=256, in_context_start=10),
}
JiT_models = {}
for _size, _config in _SIZES.items():
    for _patch in (16, 32):
        JiT_models[f"JiT-{_size}/{_patch}"] = constructor(
            f"JiT_{_size}_{_patch}", JiT, **_config, patch_size=_patch, input_size=16 * _patch
        )
globals().update({build.__name__: build for build in JiT_models.values()})
