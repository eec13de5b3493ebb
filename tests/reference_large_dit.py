"""Large-DiT written straight from its definition, in float64 and plain tensor operations, from a state dict. It shares
no line with large_dit.py; slow and exact, it is what every faster network is held to."""

import math

import torch


def silu(x):
    return x / (1 + torch.exp(-x))


def rms_norm(x, weight):
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5) * weight


def layer_norm(x, eps, weight=1.0, bias=0.0):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps) * weight + bias


def rotary(x, head_dim):
    """x (N, T, h·d): in every head the pairs (2i, 2i+1) are complex numbers, turned by position·10000^(-2i/d)."""
    n, tokens, width = x.shape
    numbers = torch.view_as_complex(x.reshape(n, tokens, width // head_dim, head_dim // 2, 2))
    angles = torch.zeros(tokens, head_dim // 2, dtype=torch.float64)
    for position in range(tokens):
        for i in range(head_dim // 2):
            angles[position, i] = position * 10000 ** (-2 * i / head_dim)
    turned = numbers * torch.complex(angles.cos(), angles.sin())[None, :, None]
    return torch.view_as_real(turned).reshape(n, tokens, width)


def large_dit(state, x, t, y, heads, patch=2):
    """state: a Large-DiT's state dict; x (N, C, H, W); t, y (N,) → (N, C', H, W) float64."""
    p = {name: value.double() for name, value in state.items()}

    def linear(v, name):
        return torch.einsum("...i,oi->...o", v, p[f"{name}.weight"]) + p.get(f"{name}.bias", 0)

    n, channels, height, width = x.shape
    rows, columns = height // patch, width // patch
    dim = p["x_embedder.weight"].shape[0]
    d = dim // heads
    tokens = torch.zeros(n, rows * columns, channels * patch * patch, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            cut = x.double()[:, :, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
            tokens[:, row * columns + column] = cut.reshape(n, -1)  # channel, row, column
    tokens = linear(tokens, "x_embedder")

    angles = torch.stack([t.double() * 10000 ** (-i / 128) for i in range(128)], dim=1)
    time = linear(torch.cat([torch.cos(angles), torch.sin(angles)], dim=1), "t_embedder.mlp.0")
    condition = silu(linear(silu(time), "t_embedder.mlp.2") + p["y_embedder.embedding_table.weight"][y])

    depth = sum(name.endswith("attention.wq.weight") for name in state)
    for b in range(depth):
        block, attention = f"layers.{b}", f"layers.{b}.attention"
        m = linear(condition, f"{block}.adaLN_modulation.1")
        shift1, scale1, gate1, shift2, scale2, gate2 = (m[:, None, i * dim : (i + 1) * dim] for i in range(6))
        h = rms_norm(tokens, p[f"{block}.attention_norm.weight"]) * (1 + scale1) + shift1
        q, k, v = (linear(h, f"{attention}.w{name}") for name in "qkv")
        if f"{attention}.q_norm.weight" in p:
            q = layer_norm(q, 1e-5, p[f"{attention}.q_norm.weight"], p[f"{attention}.q_norm.bias"])
            k = layer_norm(k, 1e-5, p[f"{attention}.k_norm.weight"], p[f"{attention}.k_norm.bias"])
        q, k = rotary(q, d), rotary(k, d)
        shared = heads * d // k.shape[-1]  # query heads to a head of keys and values
        mixed = torch.zeros_like(tokens)
        for head in range(heads):
            mine, theirs = (slice(i * d, (i + 1) * d) for i in (head, head // shared))
            scores = torch.einsum("nid,njd->nij", q[..., mine], k[..., theirs]) / math.sqrt(d)
            weights = torch.exp(scores - scores.amax(-1, keepdim=True))
            weights = weights / weights.sum(-1, keepdim=True)
            mixed[..., mine] = torch.einsum("nij,njd->nid", weights, v[..., theirs])
        tokens = tokens + gate1 * linear(mixed, f"{attention}.wo")
        h = rms_norm(tokens, p[f"{block}.ffn_norm.weight"]) * (1 + scale2) + shift2
        hidden = silu(linear(h, f"{block}.feed_forward.w1")) * linear(h, f"{block}.feed_forward.w3")
        tokens = tokens + gate2 * linear(hidden, f"{block}.feed_forward.w2")

    m = linear(condition, "final_layer.adaLN_modulation.1")
    out = linear(layer_norm(tokens, 1e-6) * (1 + m[:, None, dim:]) + m[:, None, :dim], "final_layer.linear")
    c = out.shape[-1] // patch**2
    picture = torch.zeros(n, c, height, width, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            token = out[:, row * columns + column].reshape(n, patch, patch, c)  # row, column, channel
            place = slice(row * patch, (row + 1) * patch), slice(column * patch, (column + 1) * patch)
            picture[:, :, place[0], place[1]] = token.permute(0, 3, 1, 2)
    return picture
