"""The DiT of arXiv:2212.09748 written straight from the paper, in float64 and plain matrix multiplications, from a
state dict. It shares no line with models.py; slow and exact, it is what every faster network is held to."""

import math

import torch


def layer_norm(x):
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-6)


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + torch.exp(-x))


def position_table(side, width):
    """(side², width): for a token at (row, column), sines and cosines of the column, then of the row."""
    quarter = width // 4
    table = torch.zeros(side * side, width, dtype=torch.float64)
    for row in range(side):
        for column in range(side):
            for block, position in enumerate((column, row)):
                for i in range(quarter):
                    angle = position / 10000 ** (i / quarter)
                    table[row * side + column, block * 2 * quarter + i] = math.sin(angle)
                    table[row * side + column, block * 2 * quarter + quarter + i] = math.cos(angle)
    return table


def dit(state, x, t, y, heads, patch):
    """state: a DiT's state dict; x (N, C, H, W); t, y (N,) → (N, C', H, W) float64."""
    p = {name: value.double() for name, value in state.items()}

    def linear(v, name):
        return torch.einsum("...i,oi->...o", v, p[f"{name}.weight"]) + p[f"{name}.bias"]

    n, channels, height, width = x.shape
    side_h, side_w = height // patch, width // patch
    kernel = p["x_embedder.proj.weight"]
    dim = kernel.shape[0]
    tokens = torch.zeros(n, side_h * side_w, dim, dtype=torch.float64)
    for row in range(side_h):
        for column in range(side_w):
            cut = x.double()[:, :, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
            tokens[:, row * side_w + column] = torch.einsum("nchw,dchw->nd", cut, kernel) + p["x_embedder.proj.bias"]
    tokens = tokens + p["pos_embed"]

    half = 128
    angles = torch.stack([t.double() * math.exp(-math.log(10000) * i / half) for i in range(half)], dim=1)
    time = linear(
        silu(linear(torch.cat([torch.cos(angles), torch.sin(angles)], dim=1), "t_embedder.mlp.0")), "t_embedder.mlp.2"
    )
    condition = silu(time + p["y_embedder.embedding_table.weight"][y])

    depth = sum(name.endswith("attn.qkv.weight") for name in state)
    for b in range(depth):
        m = linear(condition, f"blocks.{b}.adaLN_modulation.1")
        shift1, scale1, gate1, shift2, scale2, gate2 = (m[:, None, i * dim : (i + 1) * dim] for i in range(6))
        qkv = linear(layer_norm(tokens) * (1 + scale1) + shift1, f"blocks.{b}.attn.qkv")
        d = dim // heads
        mixed = torch.zeros_like(tokens)
        for h in range(heads):
            q, k, v = (qkv[..., part * dim + h * d : part * dim + (h + 1) * d] for part in range(3))
            scores = torch.einsum("nid,njd->nij", q, k) / math.sqrt(d)
            weights = torch.exp(scores - scores.amax(-1, keepdim=True))
            mixed[..., h * d : (h + 1) * d] = torch.einsum("nij,njd->nid", weights / weights.sum(-1, keepdim=True), v)
        tokens = tokens + gate1 * linear(mixed, f"blocks.{b}.attn.proj")
        hidden = gelu(linear(layer_norm(tokens) * (1 + scale2) + shift2, f"blocks.{b}.mlp.fc1"))
        tokens = tokens + gate2 * linear(hidden, f"blocks.{b}.mlp.fc2")

    m = linear(condition, "final_layer.adaLN_modulation.1")
    out = linear(layer_norm(tokens) * (1 + m[:, None, dim:]) + m[:, None, :dim], "final_layer.linear")
    c = out.shape[-1] // patch**2
    picture = torch.zeros(n, c, height, width, dtype=torch.float64)
    for row in range(side_h):
        for column in range(side_w):
            token = out[:, row * side_w + column].reshape(n, patch, patch, c)
            picture[:, :, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch] = token.permute(
                0, 3, 1, 2
            )
    return picture


def relative_error(value, reference):
    return ((value.double() - reference).norm() / reference.norm()).item()
