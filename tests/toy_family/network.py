"""The network of the family Toy. Shapes: N batch rows, C = 3 channels, T tokens, D width."""

import torch
import torch.nn.functional as F
from torch import nn

from accel.runtime.stages import unpatchify


def attention(qkv, num_heads):
    """qkv (N, T, 3·D) → (N, T, D)."""
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)  # each (N, h, T, d)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, c, attend):
        return x + self.out(
            F.silu(attend(self.qkv(F.layer_norm(x + c[:, None], x.shape[-1:])), Toy.num_heads))
        )


class Toy(nn.Module):
    """x (N, 3, L, L), t (N,), y (N,) → noise (N, 3, L, L)."""

    in_channels = out_channels = 3
    patch_size = 2
    num_heads = 4
    attend = staticmethod(attention)

    def __init__(self, input_size=6, num_classes=5, class_dropout_prob=0.1, width=32):
        super().__init__()
        self.input_size = input_size
        self.width = width
        self.patches = nn.Linear(12, width)
        self.places = nn.Linear(2, width)
        self.time = nn.Linear(8, width)
        self.labels = nn.Embedding(num_classes + (class_dropout_prob > 0), width)
        self.blocks = nn.ModuleList(Layer(width) for _ in range(3))
        self.last = nn.Linear(width, 12)

    def embed(self, x, tokens=slice(None)):
        """The part `tokens` of the tokens (N, T, D) of latents x."""
        side = torch.linspace(-1, 1, x.shape[-1] // 2, device=x.device)
        h = F.pixel_unshuffle(x, 2).flatten(2).transpose(1, 2)  # (N, T, 12)
        return (self.patches(h) + self.places(torch.cartesian_prod(side, side)))[:, tokens]

    def condition(self, t, y):
        """What a layer adds to its input, (N, D)."""
        powers = t[:, None] / 2.0 ** torch.arange(2, 10, device=t.device)  # (N, 8)
        return self.time(powers.cos()) + self.labels(y)

    def transform(self, x, c, attend=attention, tokens=slice(None), blocks=None):
        """Some layers, or all."""
        for block in self.blocks if blocks is None else blocks:
            x = block(x, c, attend)
        return x

    def head(self, x, c):
        """The patches of noise (N, T, 12), inside a token in the order (2, 2, 3)."""
        return self.last(x)

    def forward(self, x, t, y):
        c = self.condition(t, y)
        return unpatchify(self.head(self.transform(self.embed(x), c), c), 2)
