"""The decoder of a representation autoencoder (Zheng et al. 2025, arXiv:2510.11690): a ViT that
turns each latent position, as a token, into a patch of pixels.

    z = z·√(var + ε) + mean; x = [cls; W z] + positions
    x = x + Attention(LN(x)); x = x + MLP(LN(x)), the MLP with exact GELU
    patches = W LN(x), without the cls token

The float16 version keeps the residual stream, LayerNorm and softmax statistics in float32.
"""

from collections import OrderedDict
from copy import deepcopy
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


class Sizes(NamedTuple):
    """Sizes of a decoder. side: of the latent; patch: side of a token's patch in pixels."""

    channels: int
    side: int
    patch: int
    width: int
    depth: int
    heads: int
    mlp: int
    eps: float  # of LayerNorm


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Multi-head attention softmax(q kᵀ / √d) v of tokens (N, T, D), with head width d."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))  # (N, H, T, d)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Linear(nn.Linear):
    """A linear layer that casts its input to the dtype of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def dense(inputs: int, outputs: int) -> nn.Module:
    """Build a linear layer under the checkpoint's name, `dense`."""
    return nn.Sequential(OrderedDict(dense=Linear(inputs, outputs)))


def fused(layers: list[Any]) -> Linear:
    """Fuse linear layers with the same input into a single GEMM."""
    layer = Linear(1, 1, device="meta")
    layer.weight = nn.Parameter(torch.cat([part.weight for part in layers]))
    layer.bias = nn.Parameter(torch.cat([part.bias for part in layers]))
    return layer


class Attention(nn.Module):
    """Self-attention over all tokens (N, T, D)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        layers = {name: Linear(width, width) for name in ("query", "key", "value")}
        self.attention = nn.ModuleDict(layers)  # fused to "qkv" in float16
        self.output = dense(width, width)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [layer(x) for layer in self.attention.values()]
        q, k, v = outputs if len(outputs) == 3 else outputs[0].chunk(3, -1)
        return self.output(attend(q, k, v, self.heads))


class Layer(nn.Module):
    """x + Attention(LN(x)), then x + MLP(LN(x))."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.layernorm_before = nn.LayerNorm(sizes.width, sizes.eps)
        self.attention = Attention(sizes.width, sizes.heads)
        self.layernorm_after = nn.LayerNorm(sizes.width, sizes.eps)
        self.intermediate = dense(sizes.width, sizes.mlp)
        self.output = dense(sizes.mlp, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.layernorm_before(x))
        return x + self.output(F.gelu(self.intermediate(self.layernorm_after(x))))


class ViTDecoder(nn.Module):
    """Latents (N, C, L, L) → pixels (N, 3, H, W) in (-1, 1), with the state-dict keys of published
    files and buffers for the statistics.
    """

    latent_mean: Tensor  # (C, L, L)
    latent_std: Tensor  # (C, L, L)
    image_mean: Tensor  # (3, 1, 1), for pixels in (0, 1)
    image_std: Tensor  # (3, 1, 1)

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes = sizes
        width = sizes.width
        for name in ("latent_mean", "latent_std"):
            self.register_buffer(name, torch.empty(sizes.channels, sizes.side, sizes.side))
        for name in ("image_mean", "image_std"):
            self.register_buffer(name, torch.empty(3, 1, 1))
        self.decoder_embed = Linear(sizes.channels, width)
        self.trainable_cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.decoder_pos_embed = nn.Parameter(torch.empty(1, sizes.side**2 + 1, width))
        self.decoder_layers = nn.ModuleList([Layer(sizes) for _ in range(sizes.depth)])
        self.decoder_norm = nn.LayerNorm(width, sizes.eps)
        self.decoder_pred = Linear(width, 3 * sizes.patch**2)

    def forward(self, z: Tensor) -> Tensor:
        z = z * self.latent_std + self.latent_mean
        tokens = self.decoder_embed(z.flatten(2).transpose(1, 2))  # (N, L·L, D)
        cls = self.trainable_cls_token.expand(len(z), -1, -1)
        x = torch.cat([cls, tokens], 1) + self.decoder_pos_embed
        for layer in self.decoder_layers:
            x = layer(x)
        x = self.decoder_pred(self.decoder_norm(x))[:, 1:]  # (N, L·L, p·p·3)
        side = self.sizes.side
        patch = self.sizes.patch
        x = x.reshape(-1, side, side, patch, patch, 3).permute(0, 5, 1, 3, 2, 4)
        x = x.reshape(-1, 3, side * patch, side * patch)
        return 2 * (x * self.image_std + self.image_mean) - 1


def half_of(decoder: ViTDecoder, dtype: torch.dtype = torch.float16) -> ViTDecoder:
    """Copy the decoder with linear layers in half precision.

    GEMMs and attention accumulate in float32, and the residual stream is float32. A value that
    overflows float16 reaches the residual stream and turns the image into NaN.
    """
    half = deepcopy(decoder)
    for module in list(half.modules()):
        if isinstance(module, Attention):
            module.attention = nn.ModuleDict({"qkv": fused(list(module.attention.values()))})
    for module in half.modules():
        if isinstance(module, Linear):
            module.to(dtype)
    return half
