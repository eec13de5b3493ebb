"""The decoder half of a representation autoencoder (Zheng et al. 2025, arXiv:2510.11690): a
ViT over a token a latent position, each of which becomes a patch of pixels.

    z = z·√(var + ε) + mean; x = [cls; W z] + positions
    x = x + Attention(LN(x)); x = x + MLP(LN(x)), the MLP with exact GELU
    patches = W LN(x), without the cls token's

In float32, and in float16 with a float32 residual stream, LayerNorm and softmax statistics.
"""

from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


class Sizes(NamedTuple):
    """Sizes of a decoder. side: of a latent; patch: pixels of a side that a token becomes."""

    channels: int
    side: int
    patch: int
    width: int
    depth: int
    heads: int
    mlp: int
    eps: float  # of LayerNorm


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Return softmax(q kᵀ / √d) v of tokens (N, T, D), by heads of width d."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))  # (N, H, T, d)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Dense(nn.Module):
    """A linear layer under the name that files give it."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x)


class Projections(nn.Module):
    """Queries, keys and values of tokens."""

    def __init__(self, width: int):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)


class Attention(nn.Module):
    """Self-attention over all tokens (N, T, D)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention = Projections(width)
        self.output = Dense(width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.attention
        return self.output(attend(qkv.query(x), qkv.key(x), qkv.value(x), self.heads))


class Layer(nn.Module):
    """x + Attention(LN(x)), then x + MLP(LN(x))."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.layernorm_before = nn.LayerNorm(sizes.width, sizes.eps)
        self.attention = Attention(sizes.width, sizes.heads)
        self.layernorm_after = nn.LayerNorm(sizes.width, sizes.eps)
        self.intermediate = Dense(sizes.width, sizes.mlp)
        self.output = Dense(sizes.mlp, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.layernorm_before(x))
        return x + self.output(F.gelu(self.intermediate(self.layernorm_after(x))))


class ViTDecoder(nn.Module):
    """Latents (N, C, L, L) → pixels (N, 3, H, W) in (-1, 1). Its state-dict keys are those of
    published files; `latent_` and `image_` begin those of statistics.
    """

    latent_mean: Tensor  # (C, L, L), and
    latent_std: Tensor
    image_mean: Tensor  # (3, 1, 1), of pixels in (0, 1), and
    image_std: Tensor

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes = sizes
        width = sizes.width
        for name in ("latent_mean", "latent_std"):
            self.register_buffer(name, torch.empty(sizes.channels, sizes.side, sizes.side))
        for name in ("image_mean", "image_std"):
            self.register_buffer(name, torch.empty(3, 1, 1))
        self.decoder_embed = nn.Linear(sizes.channels, width)
        self.trainable_cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.decoder_pos_embed = nn.Parameter(torch.empty(1, sizes.side**2 + 1, width))
        self.decoder_layers = nn.ModuleList([Layer(sizes) for _ in range(sizes.depth)])
        self.decoder_norm = nn.LayerNorm(width, sizes.eps)
        self.decoder_pred = nn.Linear(width, 3 * sizes.patch**2)

    @property
    def layers(self) -> list[Layer]:
        """Return the layers in their order."""
        return [layer for layer in self.decoder_layers if isinstance(layer, Layer)]

    def forward(self, z: Tensor) -> Tensor:
        x = self.with_positions(self.decoder_embed(self.tokens(z)))
        for layer in self.layers:
            x = layer(x)
        return self.pixels(self.decoder_pred(self.decoder_norm(x)))

    def tokens(self, z: Tensor) -> Tensor:
        """Return the latents of the autoencoder, (N, L·L, C)."""
        return (z * self.latent_std + self.latent_mean).flatten(2).transpose(1, 2)

    def with_positions(self, x: Tensor) -> Tensor:
        """Prepend the cls token to (N, L·L, D) and add the positions."""
        cls = self.trainable_cls_token.expand(len(x), -1, -1)
        return torch.cat([cls, x], 1) + self.decoder_pos_embed

    def pixels(self, patches: Tensor) -> Tensor:
        """Lay out the patches (N, 1 + L·L, p·p·3) of all tokens as pixels."""
        side = self.sizes.side
        patch = self.sizes.patch
        x = patches[:, 1:].reshape(-1, side, side, patch, patch, 3)
        x = x.permute(0, 5, 1, 3, 2, 4).reshape(-1, 3, side * patch, side * patch)
        return 2 * (x * self.image_std + self.image_mean) - 1


class HalfLayer:
    """The weights of a layer's GEMMs in half precision; queries, keys and values are one."""

    def __init__(self, layer: Layer, dtype: torch.dtype):
        self.layer = layer
        self.dtype = dtype
        attention = layer.attention
        qkv = attention.attention.query, attention.attention.key, attention.attention.value
        self.heads = attention.heads
        self.qkv_weight = torch.cat([linear.weight for linear in qkv]).to(dtype)
        self.qkv_bias = torch.cat([linear.bias for linear in qkv]).to(dtype)
        self.out = _half(attention.output.dense, dtype)
        self.up = _half(layer.intermediate.dense, dtype)
        self.down = _half(layer.output.dense, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the residual stream (1, T, D) float32 after the layer."""
        h = self.layer.layernorm_before(x).to(self.dtype)
        q, k, v = F.linear(h, self.qkv_weight, self.qkv_bias).chunk(3, -1)
        x = x + F.linear(attend(q, k, v, self.heads), *self.out)
        h = self.layer.layernorm_after(x).to(self.dtype)
        return x + F.linear(F.gelu(F.linear(h, *self.up)), *self.down)


class HalfViT:
    """A latent (1, C, L, L) → pixels (1, 3, H, W), both float32.

    GEMMs and attention read and write half precision and accumulate in float32. A value that
    overflows float16 enters the residual stream, and turns the picture into NaN.
    """

    def __init__(self, decoder: ViTDecoder, dtype: torch.dtype = torch.float16):
        self.decoder = decoder
        self.dtype = dtype
        self.embed = _half(decoder.decoder_embed, dtype)
        self.layers = [HalfLayer(layer, dtype) for layer in decoder.layers]
        self.pred = _half(decoder.decoder_pred, dtype)

    def __call__(self, z: Tensor) -> Tensor:
        decoder = self.decoder
        x = F.linear(decoder.tokens(z).to(self.dtype), *self.embed)
        x = decoder.with_positions(x.float())
        for layer in self.layers:
            x = layer(x)
        patches = F.linear(decoder.decoder_norm(x).to(self.dtype), *self.pred)
        return decoder.pixels(patches.float())


def _half(linear: nn.Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return linear.weight.to(dtype), linear.bias.to(dtype)
