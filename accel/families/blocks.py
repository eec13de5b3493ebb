"""Blocks that several families share: RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467), rotary
position embedding (Su et al. 2021, arXiv:2104.09864) and SwiGLU (Shazeer 2020, arXiv:2002.05202).

Shapes: N batch, T tokens, D width, h heads, d head dim, L side of the grid of tokens.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from accel.families.dit.network import (
    Attention,
    FinalLayer,
    PatchTransformer,
    attention,
    cached_table,
    split_heads,
)

EPS = 1e-6  # default of RMSNorm


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of norms and rotations: float64 if x has it, else float32."""
    return torch.promote_types(x.dtype, torch.float32)


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · weight over the last dimension, computed in float32 or wider."""

    def __init__(self, dim: int, eps: float = EPS):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(wide_dtype(x))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


# ---- Rotations ----


@cached_table
def rotation_table(
    head_dim: int, length: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Return cosines and sines (length, d/2, 2) of position·10000^(-2i/d), i < d/2."""
    with torch.inference_mode(False):
        exponents = torch.arange(0, head_dim, 2, dtype=dtype, device="cpu") / head_dim  # (d/2,)
        positions = torch.arange(length, dtype=dtype, device="cpu")
        angles = torch.outer(positions, 10000.0**-exponents)
        return torch.stack([angles.cos(), angles.sin()], dim=-1).to(device)


@cached_table
def grid_rotation_table(
    head_dim: int, side: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Return cosines and sines (L², d/2, 2) for the tokens of a square grid.

    The angles are row·10000^(-2i/(d/2)), i < d/4, then column·10000^(-2i/(d/2)).
    """
    with torch.inference_mode(False):
        axis = rotation_table(head_dim // 2, side, dtype, device)  # (L, d/4, 2)
        rows = axis[:, None].expand(-1, side, -1, -1)
        columns = axis[None].expand(side, -1, -1, -1)
        return torch.cat([rows, columns], dim=2).flatten(0, 1)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Apply the rotary embedding: x (N, T, h, d), rotation (T, d/2, 2) → (N, T, h, d).

    Each pair (2i, 2i+1) is a complex number, which is multiplied by exp(j·angle), j² = -1.
    """
    pairs = x.to(wide_dtype(x)).unflatten(-1, (-1, 2))  # (N, T, h, d/2, 2)
    real, imaginary = pairs.unbind(-1)
    cos, sin = rotation[:, None].unbind(-1)  # each (T, 1, d/2)
    rotated = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
    return rotated.flatten(-2).to(x.dtype)


class RotaryTransformer(PatchTransformer):
    """A transformer whose blocks rotate queries and keys."""

    def rotation(self, x: Tensor, tokens: slice) -> Tensor:
        """Return the rotations (t, d/2, 2) of tokens x (N, t, D) on x's device.

        Their dtype is `wide_dtype`. tokens: the slice of the token axis that x contains.
        """
        raise NotImplementedError

    def transform(
        self,
        x: Tensor,
        c: Tensor,
        attend: Callable = attention,
        tokens: slice = slice(None),
        blocks: Iterable[nn.Module] | None = None,
    ) -> Tensor:
        """Apply `blocks`, by default all: tokens x (N, t, D), conditioning c → (N, t, D).

        attend: replaces `attention`. tokens: the slice of the token axis that x contains.
        """
        rotation = self.rotation(x, tokens)  # (t, d/2, 2)
        replacement = () if attend is attention else (attend,)
        for block in self.blocks if blocks is None else blocks:
            x = block(x, c, rotation, *replacement)
        return x


# ---- DiT's block with RMSNorm, rotation and SwiGLU, and its last layer ----


class RotaryAttention(Attention):
    """DiT's attention with rotated queries and keys. (N, T, D) → (N, T, D).

    With `qk_norm` each head of q and k is normalised by RMSNorm before the rotation.
    """

    def __init__(self, dim: int, num_heads: int, qk_norm: bool = False):
        super().__init__(dim, num_heads)
        if qk_norm:
            self.q_norm = RMSNorm(self.head_dim)
            self.k_norm = RMSNorm(self.head_dim)

    def forward(  # type: ignore[override]  # blocks pass a rotation
        self, x: Tensor, rotation: Tensor, attend: Callable | None = None
    ) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (N, T, 3, h, d)
        q, k, v = qkv.unbind(2)  # each (N, T, h, d)
        q = rotate(self.q_norm(q), rotation)
        k = rotate(self.k_norm(k), rotation)
        qkv = torch.stack([q, k, v], dim=2).flatten(2)  # (N, T, 3·D)
        if attend:
            mixed = attend(qkv, self.num_heads)
        else:
            mixed = self.mix(*split_heads(qkv, self.num_heads))
        return self.proj_drop(self.proj(mixed))


class SwiGLU(nn.Module):
    """w3(silu(a) ∗ b), where w12 computes a and b, concatenated. (N, T, D) → (N, T, D)."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.w12 = nn.Linear(dim, 2 * hidden_dim)
        self.w3 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(a) * b)


def per_token(vectors: Tensor) -> Tensor:
    """Return (N, T, ·) unchanged, and (N, ·) as (N, 1, ·)."""
    return vectors if vectors.ndim == 3 else vectors.unsqueeze(1)


class RotaryBlock(nn.Module):
    """DiT's block with RMSNorm, rotated attention and SwiGLU, modulated per row or token."""

    def __init__(
        self, hidden_size: int, num_heads: int, mlp_ratio: float = 4.0, qk_norm: bool = False
    ):
        super().__init__()
        self.norm1 = RMSNorm(hidden_size)
        self.norm2 = RMSNorm(hidden_size)
        self.attn = RotaryAttention(hidden_size, num_heads, qk_norm)
        self.mlp = SwiGLU(hidden_size, int(2 / 3 * int(hidden_size * mlp_ratio)))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(self, x: Tensor, c: Tensor, rotation: Tensor, *attend: Callable) -> Tensor:
        """Apply attention and MLP: tokens x (N, T, D), conditioning c (N, D) or (N, T, D)
        → (N, T, D).

        rotation (T, d/2, 2). attend: an optional argument for `attn`.
        """
        vectors = per_token(self.adaLN_modulation(c)).chunk(6, dim=2)  # each (N, 1 or T, D)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = vectors
        h = torch.addcmul(shift_msa, self.norm1(x), 1 + scale_msa)
        x = torch.addcmul(x, gate_msa, self.attn(h, rotation, *attend))
        h = torch.addcmul(shift_mlp, self.norm2(x), 1 + scale_mlp)
        return torch.addcmul(x, gate_mlp, self.mlp(h))


class RMSFinalLayer(FinalLayer):
    """DiT's final layer with an RMSNorm, modulated per batch row or per token."""

    def __init__(self, hidden_size: int, patch_size: int, out_channels: int):
        super().__init__(hidden_size, patch_size, out_channels)
        self.norm_final = RMSNorm(hidden_size)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = per_token(self.adaLN_modulation(c)).chunk(2, dim=2)  # each (N, 1 or T, D)
        return self.linear(torch.addcmul(shift, self.norm_final(x), 1 + scale))


def first_channels(patches: Tensor, channels: int, used: int) -> Tensor:
    """Keep the first `used` channels of patches: (N, T, p·p·channels) → (N, T, p·p·used).

    The order inside a token is (p, p, channels).
    """
    return patches.unflatten(-1, (-1, channels))[..., :used].flatten(-2)
