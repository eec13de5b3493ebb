"""Large-DiT: the diffusion transformer with LLaMA's block.

By Alpha-VLLM (LLaMA2-Accessory, Large-DiT-ImageNet). Sampler, guidance and latents are DiT's. The
block differs: RMSNorm, rotary
position embedding, SwiGLU, and optionally normalised queries and keys. Names, constructor arguments
and state-dict keys are those of the published checkpoints, which load with ``strict=True``.

Shapes: N batch, C latent channels, H = W latent side, p patch side, T = (H/p)² tokens, D width,
h heads, d head dim.
"""

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from accel.families.blocks import RMSNorm, RotaryTransformer, rotate, rotation_table, wide_dtype
from accel.families.dit.network import FinalLayer as DiTFinalLayer
from accel.families.dit.network import (
    LabelEmbedder,
    TimestepEmbedder,
    attention,
    constructor,
    modulate,
)


class Attention(nn.Module):
    """Multi-head self-attention with rotary positions. (N, T, D) → (N, T, D).

    With `n_kv_heads` < `n_heads` several query heads share a head of keys and values (Ainslie et
    al. 2023, arXiv:2305.13245). With `qk_norm` queries and keys are normalised by a LayerNorm over
    all heads before the rotation. Raises ValueError if the heads do not divide the width or the
    head dim is odd.
    """

    def __init__(
        self, dim: int, n_heads: int, n_kv_heads: int | None = None, qk_norm: bool = False
    ):
        super().__init__()
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads or n_heads
        self.head_dim = dim // n_heads
        if dim % n_heads or self.head_dim % 2 or n_heads % self.n_kv_heads:
            heads = f"{n_heads} heads, {self.n_kv_heads} of keys and values"
            raise ValueError(f"width {dim} does not divide into {heads}")
        kv_dim = self.n_kv_heads * self.head_dim
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_dim, bias=False)
        self.wv = nn.Linear(dim, kv_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.q_norm = nn.LayerNorm(dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(kv_dim) if qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotation: Tensor, attend: Callable = attention) -> Tensor:
        q = self.q_norm(self.wq(x))  # (N, T, D)
        k = self.k_norm(self.wk(x))  # (N, T, kv heads · d)
        v = self.wv(x)
        q = rotate(q.unflatten(-1, (self.n_heads, -1)), rotation)  # (N, T, h, d)
        k = rotate(k.unflatten(-1, (self.n_kv_heads, -1)), rotation)
        v = v.unflatten(-1, (self.n_kv_heads, -1))
        sharing = self.n_heads // self.n_kv_heads  # query heads that share a head of keys
        k = k.repeat_interleave(sharing, dim=2)  # (N, T, h, d)
        v = v.repeat_interleave(sharing, dim=2)
        qkv = torch.cat([q, k, v], dim=2).flatten(2)  # (N, T, 3·D)
        return self.wo(attend(qkv, self.n_heads))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1·x) ∗ w3·x), (N, T, D) → (N, T, D).

    The hidden width is `ffn_dim_multiplier` · 8/3 of `dim`, rounded up to a multiple of
    `multiple_of`.
    """

    def __init__(self, dim: int, multiple_of: int = 256, ffn_dim_multiplier: float | None = None):
        super().__init__()
        hidden = int(8 * dim / 3)
        if ffn_dim_multiplier is not None:
            hidden = int(ffn_dim_multiplier * hidden)
        hidden = -(-hidden // multiple_of) * multiple_of
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """LLaMA's block with adaptive shifts, scales and gates.

    adaLN-Zero, arXiv:2212.09748, section 3.2.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int | None,
        multiple_of: int,
        ffn_dim_multiplier: float | None,
        norm_eps: float,
        qk_norm: bool,
    ):
        super().__init__()
        self.attention = Attention(dim, n_heads, n_kv_heads, qk_norm)
        self.feed_forward = FeedForward(dim, multiple_of, ffn_dim_multiplier)
        self.attention_norm = RMSNorm(dim, norm_eps)
        self.ffn_norm = RMSNorm(dim, norm_eps)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(min(dim, 1024), 6 * dim))

    def forward(self, x: Tensor, c: Tensor, rotation: Tensor, *attend: Callable) -> Tensor:
        """Apply attention and MLP: tokens x (N, T, D) → (N, T, D).

        Conditioning c (N, min(D, 1024)), rotation (T, d/2, 2). attend: an
        optional argument for `attention`.
        """
        vectors = self.adaLN_modulation(c).chunk(6, dim=1)  # each (N, D)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = vectors
        h = modulate(self.attention_norm(x), shift_msa, scale_msa)
        x = torch.addcmul(x, gate_msa.unsqueeze(1), self.attention(h, rotation, *attend))
        h = modulate(self.ffn_norm(x), shift_mlp, scale_mlp)
        return torch.addcmul(x, gate_mlp.unsqueeze(1), self.feed_forward(h))


class FinalLayer(DiTFinalLayer):
    """DiT's final layer with conditioning of width C = min(D, 1024).

    (N, T, D), (N, C) → (N, T, p²·out_channels).
    """

    def __init__(self, dim: int, patch_size: int, out_channels: int):
        super().__init__(dim, patch_size, out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(min(dim, 1024), 2 * dim))


class DiT_Llama(RotaryTransformer):
    """Large diffusion transformer over latent patches, with the published code's arguments.

    `input_size` is the latent's side.
    """

    def __init__(
        self,
        input_size: int = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        dim: int = 4096,
        n_layers: int = 32,
        n_heads: int = 32,
        n_kv_heads: int | None = None,
        multiple_of: int = 256,
        ffn_dim_multiplier: float | None = None,
        norm_eps: float = 1e-5,
        class_dropout_prob: float = 0.1,
        num_classes: int = 1000,
        learn_sigma: bool = True,
        qk_norm: bool = False,
    ):
        condition = min(dim, 1024)
        super().__init__(
            patch_size,
            in_channels,
            learn_sigma,
            nn.Linear(patch_size * patch_size * in_channels, dim),
            TimestepEmbedder(condition),
            LabelEmbedder(num_classes, condition, class_dropout_prob),
        )
        self.input_size = input_size
        self.norm_eps = norm_eps
        self.n_heads = n_heads
        self.num_heads = n_heads  # DiT's name
        form = (dim, n_heads, n_kv_heads, multiple_of, ffn_dim_multiplier, norm_eps, qk_norm)
        self.layers = nn.ModuleList(TransformerBlock(*form) for _ in range(n_layers))
        self.final_layer = FinalLayer(dim, patch_size, self.out_channels)
        self.initialize_weights()

    def initialize_positions(self) -> None:
        """No-op: there is no position table."""

    def rotation(self, x: Tensor, tokens: slice) -> Tensor:
        length = (self.input_size // self.patch_size) ** 2
        head_dim = x.shape[-1] // self.n_heads
        return rotation_table(head_dim, length, wide_dtype(x), x.device)[tokens]

    @property
    def blocks(self) -> nn.ModuleList:  # type: ignore[override]
        """Return `layers` under DiT's name."""
        return self.layers

    def embed(self, x: Tensor, tokens: slice = slice(None)) -> Tensor:
        """Embed latents (N, C, H, W) as tokens (N, T, D), in raster order.

        Returns the slice `tokens` of each row. Raises ValueError for latents of another size.
        """
        size = tuple(x.shape[-2:])
        wanted = (self.input_size, self.input_size)
        if size != wanted:
            raise ValueError(f"input of {size} given to a model built for {wanted}")
        patches = F.pixel_unshuffle(x, self.patch_size)  # (N, C·p·p, H/p, W/p)
        patches = patches.flatten(2).transpose(1, 2)  # (N, T, C·p·p)
        return self.x_embedder(patches[:, tokens])


# ---- Configurations ----


_SIZES = {
    "600M": dict(dim=1536, n_layers=16, n_heads=32),
    "3B": dict(dim=3072, n_layers=32, n_heads=32),
    "7B": dict(dim=4096, n_layers=32, n_heads=32),
    # A small model, trained on drawn pictures, whose weights ship with the code. Head dim of 3B.
    "Demo": dict(dim=192, n_layers=10, n_heads=2, input_size=16, num_classes=8, qk_norm=True),
}
Large_DiT_models = {}
for _size, _config in _SIZES.items():
    _build = constructor(f"DiT_Llama_{_size}_patch2", DiT_Llama, patch_size=2, **_config)
    Large_DiT_models[f"Large-DiT-{_size}/2"] = _build
globals().update({build.__name__: build for build in Large_DiT_models.values()})
