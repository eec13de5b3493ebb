"""The network of RAE, DiT^DH: Zheng et al. 2025, arXiv:2510.11690.

A trunk of LightningDiT's blocks reads the latents x. The head, a few wide blocks, reads x by a
second embedding, and the trunk's output modulates it token by token. With the embeddings τ of the
time and y of the label:

    s ← trunk(embed(x) + positions)        blocks modulated by SiLU(τ + y)
    s ← projected(SiLU(τ + s))             one vector per token
    v ← head(embed'(x))                    blocks and last layer modulated by s

Names and state-dict keys match the published checkpoints, which were trained with times from data
to noise and the velocity noise − data. Here times run from 0 (noise) to 1 (data), as in all flows,
so the network embeds 1 − t and negates its output.

Shapes: N batch, T tokens, D width of the trunk, W width of the head, h heads, d head dim.
"""

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from accel.families.blocks import (
    RMSFinalLayer,
    RotaryBlock,
    RotaryTransformer,
    grid_rotation_table,
)
from accel.families.dit.network import (
    LabelEmbedder,
    PatchEmbed,
    TimestepEmbedder,
    constructor,
    position_embedding,
)
from accel.runtime.stages import Stage, forward_stages


class Condition(NamedTuple):
    """The conditioning of batch rows."""

    vector: Tensor  # (N, D), of time and label
    time: Tensor  # (N, D), the time's embedding


def fourier(t: Tensor, frequencies: Tensor) -> Tensor:
    """Embed times t (N,), from noise to data: sines, then cosines of 2π·(1 − t)·f → (N, 2·F)."""
    angles = (1 - t)[:, None] * frequencies * 2 * torch.pi
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class FourierEmbedder(TimestepEmbedder):
    """Embed times by stored random frequencies and DiT's MLP. (N,) → (N, D)."""

    def __init__(self, hidden_size: int, count: int = 256):
        super().__init__(hidden_size, 2 * count)
        self.W = nn.Parameter(torch.empty(count).normal_(), requires_grad=False)

    def forward(self, t: Tensor) -> Tensor:
        return self.mlp(fourier(t, self.W).to(self.W.dtype))


class Rotations(nn.Module):
    """The rotations of published files: cosines and sines (T, d), with every number repeated."""

    freqs_cos: Tensor
    freqs_sin: Tensor

    def __init__(self, head_dim: int, side: int):
        super().__init__()
        table = grid_rotation_table(head_dim, side, torch.float32, "cpu").repeat_interleave(
            2, dim=1
        )
        cos, sin = table.to(torch.get_default_device()).unbind(-1)
        self.register_buffer("freqs_cos", cos.contiguous())
        self.register_buffer("freqs_sin", sin.contiguous())

    def forward(self) -> Tensor:
        """Return LightningDiT's table (T, d/2, 2)."""
        return torch.stack([self.freqs_cos, self.freqs_sin], dim=-1)[:, ::2]


class DiTwDDTHead(RotaryTransformer):
    """Estimate the velocity data − noise: x (N, C, H, W), t (N,), y (N,) → (N, C, H, W).

    t runs from 0, noise, to 1, data. hidden_size, depth and num_heads are pairs for trunk and head.
    """

    def __init__(
        self,
        input_size: int = 16,
        in_channels: int = 768,
        hidden_size: Sequence[int] = (1152, 2048),
        depth: Sequence[int] = (28, 2),
        num_heads: Sequence[int] = (16, 16),
        mlp_ratio: float = 4.0,
        class_dropout_prob: float = 0.1,
        num_classes: int = 1000,
        use_qknorm: bool = False,
    ):
        trunk, head = hidden_size
        super().__init__(
            1,  # patch
            in_channels,
            False,  # no learned variance
            PatchEmbed(input_size, 1, in_channels, head),
            FourierEmbedder(trunk),
            LabelEmbedder(num_classes, trunk, class_dropout_prob),
        )
        self.guided_channels = in_channels
        self.num_encoder_blocks = depth[0]
        self.heads = tuple(num_heads)
        self.num_heads = gcd(*num_heads)
        self.pos_embed = position_embedding(input_size, trunk)
        self.blocks = nn.ModuleList(
            RotaryBlock(width, heads, mlp_ratio, use_qknorm)
            for width, count, heads in zip(hidden_size, depth, num_heads)
            for _ in range(count)
        )
        self.final_layer = RMSFinalLayer(head, 1, in_channels)
        self.s_embedder = PatchEmbed(input_size, 1, in_channels, trunk)
        self.s_projector = nn.Linear(trunk, head)
        self.enc_feat_rope = Rotations(trunk // num_heads[0], input_size)
        self.dec_feat_rope = Rotations(head // num_heads[1], input_size)
        self.initialize_weights()

    def embed(self, x: Tensor, tokens: slice = slice(None)) -> Tensor:
        """Embed latents (N, C, H, W) for the trunk and for the head, side by side → (N, T, D + W).

        Returns the slice `tokens` of each row.
        """
        s = self.s_embedder(x) + self.pos_embed
        return torch.cat([s, self.x_embedder(x)], dim=-1)[:, tokens]

    def condition(self, t: Tensor, y: Tensor) -> Condition:  # type: ignore[override]
        """Return the conditioning of times t (N,) and labels y (N,)."""
        time = self.t_embedder(t)
        return Condition(F.silu(time + self.y_embedder(y, self.training)), time)

    @property
    def stages(self) -> list[Stage]:
        """Return the trunk and the head."""
        blocks = list(self.blocks)
        count = self.num_encoder_blocks
        trunk = self.s_projector.in_features
        return [
            Stage(
                blocks[:count],
                trunk,
                self.heads[0],
                enter=lambda x, embedded, condition: embedded[..., :trunk],
                modulate=lambda x, condition: condition.vector,
            ),
            Stage(
                blocks[count:],
                self.s_projector.out_features,
                self.heads[1],
                enter=lambda x, embedded, condition: embedded[..., trunk:],
                modulate=self.token_modulation,
            ),
        ]

    def token_modulation(self, x: Tensor, condition: Condition) -> Tensor:
        """Return the head's modulation (N, T, W) from the trunk's tokens x (N, T, D)."""
        return self.s_projector(F.silu(condition.time.unsqueeze(1) + x))

    def rotation(self, x: Tensor, tokens: slice) -> Tensor:
        """Return the rotations (t, d/2, 2) of tokens with the width of trunk or head."""
        is_trunk = x.shape[-1] == self.s_projector.in_features
        return (self.enc_feat_rope if is_trunk else self.dec_feat_rope)()[tokens]

    def head(self, x: Tensor, c: Tensor) -> Tensor:
        """Project tokens x (N, T, W), conditioning c (N, T, W), to velocities (N, T, C)."""
        return -self.final_layer(x, c)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Estimate the velocity: x (N, C, H, W), t (N,), y (N,) → (N, C, H, W)."""
        c = self.condition(t, y)
        return self.unpatchify(forward_stages(self, self.stages, self.embed(x), c, self.attend))


# ---- Configurations ----

_SIZES = {
    "XL": dict(hidden_size=(1152, 2048), depth=(28, 2), num_heads=(16, 16)),
    "L": dict(hidden_size=(1024, 2048), depth=(24, 2), num_heads=(16, 16)),
    "B": dict(hidden_size=(768, 2048), depth=(12, 2), num_heads=(12, 16)),
    "S": dict(hidden_size=(384, 2048), depth=(12, 2), num_heads=(6, 16)),
}
DiTDH_models = {
    f"DiTDH-{size}/1": constructor(f"DiTDH_{size}_1", DiTwDDTHead, **config)
    for size, config in _SIZES.items()
}
globals().update({build.__name__: build for build in DiTDH_models.values()})
