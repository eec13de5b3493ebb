"""LightningDiT: Yao et al. 2025, "Reconstruction vs. Generation", arXiv:2501.01423.

SiT's flow with another block: RMSNorm (arXiv:1910.07467), SwiGLU (arXiv:2002.05202), and rotary
embedding (arXiv:2104.09864) by a token's row and column. Names and state-dict keys are those of the
published checkpoints. weights.py converts their table of rotations and their modulation without
shifts.

Shapes: N batch, T tokens, D width, h heads, d head dim, L side of the grid of tokens.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from accel.families.dit import network as dit
from accel.families.dit.network import _constructor, attention
from accel.families.large_dit.network import DiT_Llama, RMSNorm, rotate
from accel.families.large_dit.network import rotation_table as axis_table
from accel.families.lightning_dit import SIZES
from accel.families.sit.network import SiT

EPS = 1e-6


@lru_cache(maxsize=None)
def rotation_table(
    head_dim: int, side: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Return cosines and sines (L², d/2, 2) of a token's row, then of its column.

    Their angles are row·10000^(-2i/(d/2)) and column·10000^(-2i/(d/2)), i < d/4.
    """
    with torch.inference_mode(False):
        axis = axis_table(head_dim // 2, side, dtype, device)  # (L, d/4, 2)
        rows = axis[:, None].expand(-1, side, -1, -1)
        columns = axis[None].expand(side, -1, -1, -1)
        return torch.cat([rows, columns], dim=2).flatten(0, 1)


class Attention(dit.Attention):
    """DiT's attention with rotated queries and keys. (N, T, D) → (N, T, D).

    With `qk_norm` each head of q and k passes an RMSNorm before the rotation.
    """

    def __init__(self, dim: int, num_heads: int, qk_norm: bool = False):
        super().__init__(dim, num_heads)
        head_dim = dim // num_heads
        self.q_norm = RMSNorm(head_dim, EPS) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_dim, EPS) if qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotation: Tensor, attend: Callable = attention) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (N, T, 3, h, d)
        q, k, v = qkv.unbind(2)  # each (N, T, h, d)
        q = rotate(self.q_norm(q), rotation)
        k = rotate(self.k_norm(k), rotation)
        qkv = torch.stack([q, k, v], dim=2).flatten(2)  # (N, T, 3·D)
        return self.proj(attend(qkv, self.num_heads))


class SwiGLU(nn.Module):
    """w3(silu(a) ∗ b), where w12 computes a and b, concatenated. (N, T, D) → (N, T, D)."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.w12 = nn.Linear(dim, 2 * hidden_dim)
        self.w3 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(a) * b)


def of_tokens(vectors: Tensor) -> Tensor:
    """Return vectors a token, (N, T, ·) as they are, and (N, ·) as (N, 1, ·)."""
    return vectors if vectors.ndim == 3 else vectors.unsqueeze(1)


class LightningDiTBlock(nn.Module):
    """DiT's block with RMSNorm, rotated attention and SwiGLU, modulated by batch row or token."""

    def __init__(
        self, hidden_size: int, num_heads: int, mlp_ratio: float = 4.0, qk_norm: bool = False
    ):
        super().__init__()
        self.norm1 = RMSNorm(hidden_size, EPS)
        self.norm2 = RMSNorm(hidden_size, EPS)
        self.attn = Attention(hidden_size, num_heads, qk_norm)
        self.mlp = SwiGLU(hidden_size, int(2 / 3 * int(hidden_size * mlp_ratio)))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(
        self, x: Tensor, c: Tensor, rotation: Tensor, attend: Callable = attention
    ) -> Tensor:
        """Apply attention and MLP: tokens x (N, T, D), conditioning c (N, D) or (N, T, D)
        → (N, T, D).

        rotation (T, d/2, 2). attend: in place of `attention`.
        """
        vectors = of_tokens(self.adaLN_modulation(c)).chunk(6, dim=2)  # each (N, 1 or T, D)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = vectors
        h = torch.addcmul(shift_msa, self.norm1(x), 1 + scale_msa)
        x = torch.addcmul(x, gate_msa, self.attn(h, rotation, attend))
        h = torch.addcmul(shift_mlp, self.norm2(x), 1 + scale_mlp)
        return torch.addcmul(x, gate_mlp, self.mlp(h))


class FinalLayer(dit.FinalLayer):
    """DiT's final layer with an RMSNorm, modulated by batch row or token."""

    def __init__(self, hidden_size: int, patch_size: int, out_channels: int):
        super().__init__(hidden_size, patch_size, out_channels)
        self.norm_final = RMSNorm(hidden_size, EPS)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = of_tokens(self.adaLN_modulation(c)).chunk(2, dim=2)  # each (N, 1 or T, D)
        return self.linear(torch.addcmul(shift, self.norm_final(x), 1 + scale))


class LightningDiT(SiT):
    """Estimate the velocity as SiT does: x (N, C, H, W), t (N,), y (N,) → (N, C, H, W).

    t runs from 0, noise, to 1, data.
    """

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
            input_size,
            patch_size,
            in_channels,
            hidden_size,
            depth=0,  # SiT's blocks
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            class_dropout_prob=class_dropout_prob,
            num_classes=num_classes,
            learn_sigma=learn_sigma,
        )
        self.blocks = nn.ModuleList(
            LightningDiTBlock(hidden_size, num_heads, mlp_ratio, qk_norm) for _ in range(depth)
        )
        self.final_layer = FinalLayer(hidden_size, patch_size, self.out_channels)
        self.initialize_weights()

    def rotation(self, x: Tensor) -> Tensor:
        """Return the rotations of all positions (T, d/2, 2) on x's device, in float32 or wider."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        head_dim = x.shape[-1] // self.num_heads
        return rotation_table(head_dim, self.x_embedder.grid_size[0], dtype, x.device)

    transform = DiT_Llama.transform  # its blocks take `rotation` too


# ---- Configurations ----

_SIZES = {
    **dit._SIZES,
    "1p0B": dict(depth=24, hidden_size=1536, num_heads=24),
    "1p6B": dict(depth=28, hidden_size=1792, num_heads=28),
}
LightningDiT_models = {}
for _name in SIZES:  # as "XL/1"
    _size, _, _patch = _name.partition("/")
    _build = _constructor(
        f"LightningDiT_{_size}_{_patch}",
        LightningDiT,
        **_SIZES[_size],
        patch_size=int(_patch),
    )
    LightningDiT_models[f"LightningDiT-{_name}"] = _build
globals().update({build.__name__: build for build in LightningDiT_models.values()})
