"""LightningDiT: Yao et al. 2025, "Reconstruction vs. Generation", arXiv:2501.01423.

SiT's flow with another block: RMSNorm, SwiGLU, and rotary embedding by a token's row and column.
Names and state-dict keys match the published checkpoints. weights.py converts their table of
rotations and their modulation without shifts.

Shapes: N batch, C latent channels, H = W latent side, T tokens, D width, d head dim.
"""

import torch.nn as nn
from torch import Tensor

from accel.families.blocks import (
    RMSFinalLayer,
    RotaryBlock,
    RotaryTransformer,
    first_channels,
    grid_rotation_table,
    wide_dtype,
)
from accel.families.dit.network import (
    SIZES,
    LabelEmbedder,
    PatchEmbed,
    TimestepEmbedder,
    constructor,
    position_embedding,
)
from accel.families.lightning_dit import SIZES as PUBLISHED


class LightningDiT(RotaryTransformer):
    """Estimate the velocity as SiT does: x (N, C, H, W), t (N,), y (N,) → (N, C, H, W).

    t runs from 0, noise, to 1, data.
    """

    x_embedder: PatchEmbed

    def __init__(
        self,
        input_size: int = 16,
        patch_size: int = 1,
        in_channels: int = 32,
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        class_dropout_prob: float = 0.1,
        num_classes: int = 1000,
        learn_sigma: bool = False,
        qk_norm: bool = False,
    ):
        super().__init__(
            patch_size,
            in_channels,
            learn_sigma,
            PatchEmbed(input_size, patch_size, in_channels, hidden_size),
            TimestepEmbedder(hidden_size),
            LabelEmbedder(num_classes, hidden_size, class_dropout_prob),
        )
        self.num_heads = num_heads
        self.pos_embed = position_embedding(input_size // patch_size, hidden_size)
        self.blocks = nn.ModuleList(
            RotaryBlock(hidden_size, num_heads, mlp_ratio, qk_norm) for _ in range(depth)
        )
        self.final_layer = RMSFinalLayer(hidden_size, patch_size, self.out_channels)
        self.initialize_weights()

    def rotation(self, x: Tensor, tokens: slice) -> Tensor:
        head_dim = x.shape[-1] // self.num_heads
        side = self.x_embedder.grid_size[0]
        return grid_rotation_table(head_dim, side, wide_dtype(x), x.device)[tokens]

    def head(self, x: Tensor, c: Tensor) -> Tensor:
        """Project tokens to patches of velocity, as SiT does."""
        return first_channels(super().head(x, c), self.out_channels, self.in_channels)


# ---- Configurations ----

_SIZES = {
    **SIZES,
    "1p0B": dict(depth=24, hidden_size=1536, num_heads=24),
    "1p6B": dict(depth=28, hidden_size=1792, num_heads=28),
}
LightningDiT_models = {}
for _name in PUBLISHED:  # like "XL/1"
    _size, _, _patch = _name.partition("/")
    LightningDiT_models[f"LightningDiT-{_name}"] = constructor(
        f"LightningDiT_{_size}_{_patch}", LightningDiT, **_SIZES[_size], patch_size=int(_patch)
    )
globals().update({build.__name__: build for build in LightningDiT_models.values()})
