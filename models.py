"""Diffusion transformers (DiT).

Peebles & Xie, 2023, "Scalable Diffusion Models with Transformers", arXiv:2212.09748. This
file contains only the mathematics of the network: it chooses no device, precision or speed-up.
Names, constructor arguments and state-dict keys match the published checkpoints, which load with
``strict=True``.

Shapes: N batch, C latent channels, H = W latent side, p patch side, T = (H/p)² tokens, D width,
h heads, d head dim.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache, wraps
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return x·(1 + scale) + shift, the affine part of adaptive LayerNorm.

    x (N, T, D); shift, scale (N, D).
    """
    return torch.addcmul(shift.unsqueeze(1), x, 1 + scale.unsqueeze(1))


def cached_table(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Cache a function's tensors by its arguments, except in a trace: its tensors may be fake."""
    cached = lru_cache(maxsize=None)(make)

    @wraps(make)
    def table(*arguments):
        in_trace = torch.jit.is_tracing() or type(torch.empty(0)) is not Tensor
        return make(*arguments) if in_trace else cached(*arguments)

    return table


# ---- Embeddings of t, y and x ----


@cached_table
def _frequencies(half, max_period, device):
    """Return max_period^(-i/half), i < half, on `device`.

    Computed on the CPU, so that every device uses the same bits.
    """
    with torch.inference_mode(False):
        exponents = torch.arange(half, dtype=torch.float32, device="cpu") / half
        return torch.exp(-np.log(max_period) * exponents).to(device)


class TimestepEmbedder(nn.Module):
    """Embed timesteps by a sinusoid and a two-layer MLP. (N,) → (N, D)."""

    def __init__(self, hidden_size: int, frequency_embedding_size: int = 256):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(frequency_embedding_size, hidden_size),
            nn.SiLU(),
            nn.Linear(hidden_size, hidden_size),
        )
        self.frequency_embedding_size = frequency_embedding_size

    @staticmethod
    def timestep_embedding(t: Tensor, dim: int, max_period: int = 10000) -> Tensor:
        """Return the sinusoidal embedding, cosines first: t (N,) → (N, dim) float32.

        t is an integer or a fraction.
        """
        frequencies = _frequencies(dim // 2, max_period, t.device)
        args = t[:, None].float() * frequencies  # (N, dim/2)
        embedding = torch.cat([args.cos(), args.sin()], dim=-1)
        return F.pad(embedding, (0, dim % 2))  # an odd width ends in a zero

    def forward(self, t: Tensor) -> Tensor:
        sinusoid = self.timestep_embedding(t, self.frequency_embedding_size)
        # Quantised layers store weights as integers or float8.
        wide = (p.dtype for p in self.parameters() if p.is_floating_point() and p.itemsize > 1)
        return self.mlp(sinusoid.to(next(wide, sinusoid.dtype)))


class LabelEmbedder(nn.Module):
    """Embed class labels. (N,) → (N, D).

    With dropout the table has one more row for the null label num_classes (classifier-free
    guidance, Ho & Salimans 2022, arXiv:2207.12598).
    """

    def __init__(self, num_classes: int, hidden_size: int, dropout_prob: float):
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + (dropout_prob > 0), hidden_size)
        self.num_classes = num_classes
        self.dropout_prob = dropout_prob

    def token_drop(self, labels: Tensor, force_drop_ids: Tensor | None = None) -> Tensor:
        """Replace labels by the null label: at random with probability `dropout_prob`, or where
        `force_drop_ids` (N,) is 1.
        """
        if force_drop_ids is None:
            drop = torch.rand(labels.shape[0], device=labels.device) < self.dropout_prob
        else:
            drop = force_drop_ids == 1
        return torch.where(drop, self.num_classes, labels)

    def forward(self, labels: Tensor, train: bool, force_drop_ids: Tensor | None = None) -> Tensor:
        if (train and self.dropout_prob > 0) or force_drop_ids is not None:
            labels = self.token_drop(labels, force_drop_ids)
        return self.embedding_table(labels)


class PatchEmbed(nn.Module):
    """Project non-overlapping patches to tokens in raster order. (N, C, H, W) → (N, T, D)."""

    def __init__(self, input_size: int, patch_size: int, in_channels: int, hidden_size: int):
        super().__init__()
        self.img_size = (input_size, input_size)
        self.patch_size = (patch_size, patch_size)
        self.grid_size = (input_size // patch_size, input_size // patch_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.proj = nn.Conv2d(in_channels, hidden_size, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2:] != self.img_size:
            size = tuple(x.shape[-2:])
            raise ValueError(f"input of {size} given to a model built for {self.img_size}")
        return self.proj(x).flatten(2).transpose(1, 2)


def get_1d_sincos_pos_embed_from_grid(embed_dim: int, pos: np.ndarray) -> np.ndarray:
    """Return sines, then cosines, of pos·10000^(-2i/embed_dim), (M, embed_dim) float64.

    pos: M positions of any shape. Raises ValueError if embed_dim is odd.
    """
    if embed_dim % 2:
        raise ValueError(f"embed_dim {embed_dim}: must be even")
    omega = 10000.0 ** -(np.arange(embed_dim // 2, dtype=np.float64) / (embed_dim / 2))
    angles = np.outer(np.reshape(pos, -1), omega)  # (M, embed_dim/2)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def get_2d_sincos_pos_embed_from_grid(embed_dim: int, grid: np.ndarray) -> np.ndarray:
    """Return the table (M, embed_dim) float64 of M positions; each coordinate gets half the width.

    grid (2, …): coordinates.
    """
    halves = [get_1d_sincos_pos_embed_from_grid(embed_dim // 2, axis) for axis in grid]
    return np.concatenate(halves, axis=1)


def get_2d_sincos_pos_embed(
    embed_dim: int, grid_size: int, cls_token: bool = False, extra_tokens: int = 0
) -> np.ndarray:
    """Return the sine-cosine table of a square grid, (grid_size², embed_dim) float64.

    Rows are in raster order. The first half of the width embeds the column, the second the row.
    With `cls_token`, `extra_tokens` rows of zeros come first.
    """
    row, column = np.meshgrid(np.arange(grid_size), np.arange(grid_size), indexing="ij")
    table = get_2d_sincos_pos_embed_from_grid(embed_dim, np.stack([column, row]))
    if cls_token and extra_tokens > 0:
        table = np.concatenate([np.zeros([extra_tokens, embed_dim]), table])
    return table


def position_embedding(grid_size: int, hidden_size: int) -> nn.Parameter:
    """Return a position table (1, T, D) of zeros, which is not trained."""
    return nn.Parameter(torch.zeros(1, grid_size**2, hidden_size), requires_grad=False)


# ---- The network ----


def split_heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    """Return q, k, v, each (N, h, T, d), of qkv (N, T, 3·D): concatenated, each head-major."""
    return qkv.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def attention(qkv: Tensor, num_heads: int) -> Tensor:
    """Return softmax(q·kᵀ/√d)·v per head (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).

    qkv (N, T, 3·D): q, k, v concatenated, each head-major → (N, T, D).
    """
    q, k, v = split_heads(qkv, num_heads)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Multi-head self-attention with one projection for q, k and v. (N, T, D) → (N, T, D).

    Attributes have timm's names. Without `fused_attn` the weights softmax(scale·q·kᵀ) go through
    the module `attn_drop`, where a hook can read them. Raises ValueError if num_heads does not
    divide dim.
    """

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"width {dim} does not divide into {num_heads} heads")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.fused_attn = True
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, attend: Callable | None = None) -> Tensor:
        """attend: replaces norms and `mix`; a function like `attention`."""
        qkv = self.qkv(x)  # (N, T, 3·D)
        if attend:
            mixed = attend(qkv, self.num_heads)
        else:
            q, k, v = split_heads(qkv, self.num_heads)
            mixed = self.mix(self.q_norm(q), self.k_norm(k), v)
        return self.proj_drop(self.proj(mixed))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Apply attention to q, k, v, each (N, h, T, d) → (N, T, D)."""
        if self.fused_attn:
            dropout = self.attn_drop.p if self.training else 0.0
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        else:
            weights = (self.scale * q @ k.mT).softmax(dim=-1)  # (N, h, T, T)
            mixed = self.attn_drop(weights) @ v
        return mixed.transpose(1, 2).flatten(2)


class Mlp(nn.Module):
    """Linear, tanh GELU, linear. (N, T, D) → (N, T, D). Attributes have timm's names."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.act = nn.GELU(approximate="tanh")
        self.drop1 = nn.Dropout(0.0)
        self.norm = nn.Identity()
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.drop2 = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.drop1(self.act(self.fc1(x))))
        return self.drop2(self.fc2(hidden))


class DiTBlock(nn.Module):
    """Transformer block with adaptive LayerNorm and zero-initialised gates.

    adaLN-Zero, section 3.2 of the paper.
    """

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float = 4.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(hidden_size, num_heads)
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(hidden_size, int(hidden_size * mlp_ratio))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(self, x: Tensor, c: Tensor, *attend: Callable) -> Tensor:
        """Apply attention and MLP: tokens x (N, T, D), conditioning c (N, D) → (N, T, D).

        attend: an optional argument for `attn`.
        """
        vectors = self.adaLN_modulation(c).chunk(6, dim=1)  # each (N, D)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = vectors
        h = modulate(self.norm1(x), shift_msa, scale_msa)
        x = torch.addcmul(x, gate_msa.unsqueeze(1), self.attn(h, *attend))
        h = modulate(self.norm2(x), shift_mlp, scale_mlp)
        return torch.addcmul(x, gate_mlp.unsqueeze(1), self.mlp(h))


class FinalLayer(nn.Module):
    """Adaptive LayerNorm, then the projection of tokens to patches.

    (N, T, D), (N, D) → (N, T, p²·out_channels).
    """

    def __init__(self, hidden_size: int, patch_size: int, out_channels: int):
        super().__init__()
        self.norm_final: nn.Module = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(hidden_size, patch_size * patch_size * out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)  # each (N, D)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class PatchTransformer(nn.Module):
    """Transformer over patches, conditioned on t and y: embedding → blocks → last layer.

    A subclass passes the embedders and sets the attributes declared here. `pos_embed` is missing
    if blocks encode the positions.
    """

    num_heads: int
    pos_embed: nn.Parameter  # (1, T, D)
    blocks: nn.ModuleList
    final_layer: FinalLayer

    attend = staticmethod(attention)
    guided_channels = 3  # the output's first channels, as in the published pictures

    def __init__(
        self,
        patch_size: int,
        in_channels: int,
        learn_sigma: bool,
        x_embedder: nn.Module,
        t_embedder: TimestepEmbedder,
        y_embedder: LabelEmbedder,
    ):
        super().__init__()
        self.patch_size = patch_size
        self.in_channels = in_channels
        self.learn_sigma = learn_sigma
        self.out_channels = in_channels * 2 if learn_sigma else in_channels
        self.x_embedder = x_embedder
        self.t_embedder = t_embedder
        self.y_embedder = y_embedder

    def initialize_weights(self) -> None:
        """Initialise linears and patch embeddings by Xavier, other embeddings by normals of
        standard deviation 0.02.

        adaLN and the last layer are zeros, so that every block starts as the identity (section
        3.2). No-op on the meta device.
        """
        if self.final_layer.linear.weight.is_meta:
            return

        layers: list[nn.Linear | nn.Conv2d] = [
            module for module in self.modules() if isinstance(module, nn.Linear)
        ]
        layers += [module for module in self.modules() if isinstance(module, nn.Conv2d)]
        for layer in layers:
            nn.init.xavier_uniform_(layer.weight.flatten(1))
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        self.initialize_positions()
        for name in ("y_embedder.embedding_table", "t_embedder.mlp.0", "t_embedder.mlp.2"):
            nn.init.normal_(self.get_parameter(f"{name}.weight"), std=0.02)
        modulations = [module.adaLN_modulation[-1] for module in (*self.blocks, self.final_layer)]
        for linear in (*modulations, self.final_layer.linear):
            for weight in linear.parameters():
                nn.init.zeros_(weight)

    def initialize_positions(self) -> None:
        """Fill the position table."""
        self.pos_embed.data.copy_(self.position_table())

    def position_table(self) -> Tensor:
        """Return the sine-cosine position embedding (1, T, D) float32."""
        _, tokens, width = self.pos_embed.shape
        table = get_2d_sincos_pos_embed(width, round(tokens**0.5))
        return torch.from_numpy(table).float().unsqueeze(0)

    def unpatchify(self, x: Tensor) -> Tensor:
        """Assemble patches: tokens (N, T, p·p·C') of order (p, p, C') → (N, C', H, W)."""
        side = int(x.shape[1] ** 0.5)  # in torch.jit.trace a size is a tensor, without round()
        p = self.patch_size
        x = x.unflatten(-1, (p, p, -1)).unflatten(1, (side, side))  # (N, side, side, p, p, C')
        return x.permute(0, 5, 1, 3, 2, 4).reshape(x.shape[0], -1, side * p, side * p)

    def embed(self, x: Tensor, tokens: slice = slice(None)) -> Tensor:
        """Embed latents (N, C, H, W) as tokens with positions (N, T, D).

        Returns the slice `tokens` of each row.
        """
        return (self.x_embedder(x) + self.pos_embed)[:, tokens]

    def condition(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the conditioning of all blocks (N, D) for timesteps t (N,) and labels y (N,)."""
        return self.t_embedder(t) + self.y_embedder(y, self.training)

    def transform(
        self,
        x: Tensor,
        c: Tensor,
        attend: Callable = attention,
        tokens: slice = slice(None),
        blocks: Iterable[nn.Module] | None = None,
    ) -> Tensor:
        """Apply `blocks`, by default all: tokens x (N, T, D), conditioning c (N, D) → (N, T, D).

        attend: replaces `attention`. tokens: the slice of the token axis that x contains.
        """
        # A caller's blocks may accept only x and c.
        replacement = () if attend is attention else (attend,)
        for block in self.blocks if blocks is None else blocks:
            x = block(x, c, *replacement)
        return x

    def head(self, x: Tensor, c: Tensor) -> Tensor:
        """Project tokens x (N, T, D), conditioning c (N, D), to patches (N, T, p·p·C')."""
        return self.final_layer(x, c)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Estimate the noise of latents x (N, C, H, W) at timesteps t (N,) for labels y (N,).

        Returns (N, 2C, H, W), or (N, C, H, W) without learned sigma. Raises ValueError for latents
        of another size.
        """
        x = self.embed(x)  # (N, T, D)
        c = self.condition(t, y)  # (N, D)
        return self.unpatchify(self.head(self.transform(x, c), c))

    def forward_with_cfg(self, x: Tensor, t: Tensor, y: Tensor, cfg_scale: float) -> Tensor:
        """Evaluate with classifier-free guidance.

        x (2N, C, H, W), t (2N,), y (2N,) → (2N, C', H, W). The first N rows of x are used for both
        halves. y contains N labels, then N null labels. In both halves the first `guided_channels`
        are uncond + cfg_scale·(cond − uncond). The remaining channels are not guided.
        """
        half = x[: len(x) // 2]
        out = self.forward(torch.cat([half, half]), t, y)
        eps = out[:, : self.guided_channels]
        rest = out[:, self.guided_channels :]
        cond, uncond = eps.chunk(2)
        guided = uncond + cfg_scale * (cond - uncond)
        return torch.cat([torch.cat([guided, guided]), rest], dim=1)


class DiT(PatchTransformer):
    """Diffusion transformer over latent patches.

    `input_size` is the latent's side (the picture's side / 8). With `learn_sigma` the output has 2C
    channels: the noise estimate, then the values that interpolate the log variance (Nichol &
    Dhariwal 2021, arXiv:2102.09672, eq. 15).
    """

    def __init__(
        self,
        input_size: int = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        class_dropout_prob: float = 0.1,
        num_classes: int = 1000,
        learn_sigma: bool = True,
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
        blocks = [DiTBlock(hidden_size, num_heads, mlp_ratio) for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks)
        self.final_layer = FinalLayer(hidden_size, patch_size, self.out_channels)
        self.initialize_weights()


# ---- Configurations ----

SIZES = {
    "XL": dict(depth=28, hidden_size=1152, num_heads=16),
    "L": dict(depth=24, hidden_size=1024, num_heads=16),
    "B": dict(depth=12, hidden_size=768, num_heads=12),
    "S": dict(depth=12, hidden_size=384, num_heads=6),
}


def constructor(name: str, network: type[nn.Module], **config: Any) -> Callable[..., Any]:
    """Return the constructor `name` of a network with other defaults."""

    def build(**kwargs):
        return network(**{**config, **kwargs})

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"{name}: {network.__name__} with {config}; keyword arguments override."
    build.config = config  # type: ignore[attr-defined]
    return build


def constructors(network: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Return the constructors of all published sizes and patches by name.

    network: DiT or a subclass.
    """
    name = network.__name__
    by_name = {}
    for size, config in SIZES.items():
        for p in (2, 4, 8):
            build = constructor(f"{name}_{size}_{p}", network, patch_size=p, **config)
            by_name[f"{name}-{size}/{p}"] = build
    return by_name


DiT_models = constructors(DiT)
# A small model, trained on drawn pictures, whose weights ship with the code. Its head dim is XL's,
# so it runs XL's kernels.
DEMO = dict(patch_size=2, depth=6, hidden_size=216, num_heads=3, input_size=16, num_classes=8)
DiT_models["DiT-Demo/2"] = constructor("DiT_Demo_2", DiT, **DEMO)
globals().update({build.__name__: build for build in DiT_models.values()})
