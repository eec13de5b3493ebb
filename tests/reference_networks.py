"""DiT (arXiv:2212.09748), Large-DiT and LightningDiT (arXiv:2501.01423) written straight
from their definitions, in float64 and plain matrix multiplications, from a state dict.
They share no line with the networks in accel/families; slow and exact, they are what
every faster network is held to.
"""

import math

import torch


def normed(x, eps, weight=1.0, bias=0.0, centre=True):
    """LayerNorm; without `centre` RMSNorm."""
    x = x - x.mean(-1, keepdim=True) if centre else x
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight + bias


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + torch.exp(-x))


def angles(positions, d):
    """(T, d/2): position·10000^(-2i/d)."""
    return torch.tensor(
        [[p * 10000 ** (-2 * i / d) for i in range(d // 2)] for p in positions], dtype=torch.float64
    )


def places(side):
    """Return the rows and columns of the tokens of a square."""
    return zip(*(divmod(token, side) for token in range(side**2)))


def position_table(side, width):
    """Return (side², width): for a token at (row, column), sines and cosines of the
    column, then of the row.
    """
    row, column = (angles(positions, width // 2) for positions in places(side))
    return torch.cat([column.sin(), column.cos(), row.sin(), row.cos()], 1)


def turned(x, angles):
    """x (N, T, h·d): in every head the pairs (2i, 2i+1) are complex numbers, turned by
    angles (T, d/2).
    """
    numbers = torch.view_as_complex(x.reshape(*x.shape[:2], -1, angles.shape[1], 2))
    return torch.view_as_real(
        numbers * torch.complex(angles.cos(), angles.sin())[None, :, None]
    ).reshape(x.shape)


def attention(q, k, v, d):
    """One head of d at a time; a head of k and v serves several of q's where they have fewer."""
    mixed = torch.zeros_like(q)
    shared = q.shape[-1] // k.shape[-1]
    for head in range(q.shape[-1] // d):
        mine, theirs = (slice(i * d, (i + 1) * d) for i in (head, head // shared))
        scores = torch.einsum("nid,njd->nij", q[..., mine], k[..., theirs]) / math.sqrt(d)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        mixed[..., mine] = torch.einsum(
            "nij,njd->nid", weights / weights.sum(-1, keepdim=True), v[..., theirs]
        )
    return mixed


def cut(x, patch):
    """(N, C, H, W) → (N, T, C·p·p): channel, row, column."""
    # (N, C, rows, columns, p, p)
    patches = x.double().unfold(2, patch, patch).unfold(3, patch, patch)
    return patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


def picture(out, x, patch):
    """(N, T, p·p·C') → (N, C', H, W): row, column, channel."""
    patches = out.unflatten(2, (patch, patch, -1)).unflatten(
        1, (x.shape[2] // patch, -1)
    )  # (N, rows, columns, p, p, C')
    return patches.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


class Weights:
    def __init__(self, state):
        self.state = {name: value.double() for name, value in state.items()}

    def __getitem__(self, name):
        return self.state[name]

    def linear(self, v, name):
        return torch.einsum("...i,oi->...o", v, self[f"{name}.weight"]) + self.state.get(
            f"{name}.bias", 0
        )

    def condition(self, t, y):
        """The vector of timestep and label that every block modulates with."""
        angles = torch.stack(
            [t.double() * math.exp(-math.log(10000) * i / 128) for i in range(128)], dim=1
        )
        time = silu(
            self.linear(
                torch.cat([torch.cos(angles), torch.sin(angles)], dim=1), "t_embedder.mlp.0"
            )
        )
        return silu(
            self.linear(time, "t_embedder.mlp.2") + self["y_embedder.embedding_table.weight"][y]
        )

    def last(self, tokens, condition):
        shift, scale = self.linear(condition, "final_layer.adaLN_modulation.1")[:, None].chunk(
            2, -1
        )
        return self.linear(normed(tokens, 1e-6) * (1 + scale) + shift, "final_layer.linear")

    def depth(self, ending):
        return sum(name.endswith(ending) for name in self.state)


def dit(state, x, t, y, heads, patch):
    """state: a DiT's state dict; x (N, C, H, W); t, y (N,) → (N, C', H, W) float64."""
    p = Weights(state)
    kernel = p["x_embedder.proj.weight"]
    condition = p.condition(t, y)
    tokens = cut(x, patch) @ kernel.flatten(1).T + p["x_embedder.proj.bias"] + p["pos_embed"]
    for b in range(p.depth("attn.qkv.weight")):
        m = p.linear(condition, f"blocks.{b}.adaLN_modulation.1")[:, None]
        shift1, scale1, gate1, shift2, scale2, gate2 = m.chunk(6, -1)
        qkv = p.linear(normed(tokens, 1e-6) * (1 + scale1) + shift1, f"blocks.{b}.attn.qkv")
        mixed = attention(*qkv.chunk(3, -1), len(kernel) // heads)
        tokens = tokens + gate1 * p.linear(mixed, f"blocks.{b}.attn.proj")
        hidden = gelu(p.linear(normed(tokens, 1e-6) * (1 + scale2) + shift2, f"blocks.{b}.mlp.fc1"))
        tokens = tokens + gate2 * p.linear(hidden, f"blocks.{b}.mlp.fc2")
    return picture(p.last(tokens, condition), x, patch)


def large_dit(state, x, t, y, heads, patch=2):
    """state: a Large-DiT's state dict; x (N, C, H, W); t, y (N,) → (N, C', H, W) float64."""
    p = Weights(state)
    tokens = p.linear(cut(x, patch), "x_embedder")
    condition = p.condition(t, y)
    d = tokens.shape[2] // heads
    rotation = angles(range(tokens.shape[1]), d)
    for b in range(p.depth("attention.wq.weight")):
        block = f"layers.{b}"
        m = p.linear(condition, f"{block}.adaLN_modulation.1")[:, None]
        shift1, scale1, gate1, shift2, scale2, gate2 = m.chunk(6, -1)
        h = (
            normed(tokens, 1e-5, p[f"{block}.attention_norm.weight"], centre=False) * (1 + scale1)
            + shift1
        )
        q, k, v = (p.linear(h, f"{block}.attention.w{name}") for name in "qkv")
        if f"{block}.attention.q_norm.weight" in p.state:
            norms = (
                [p[f"{block}.attention.{name}_norm.{kind}"] for kind in ("weight", "bias")]
                for name in "qk"
            )
            q, k = (normed(one, 1e-5, *norm) for one, norm in zip((q, k), norms))
        mixed = attention(turned(q, rotation), turned(k, rotation), v, d)
        tokens = tokens + gate1 * p.linear(mixed, f"{block}.attention.wo")
        h = (
            normed(tokens, 1e-5, p[f"{block}.ffn_norm.weight"], centre=False) * (1 + scale2)
            + shift2
        )
        hidden = silu(p.linear(h, f"{block}.feed_forward.w1")) * p.linear(
            h, f"{block}.feed_forward.w3"
        )
        tokens = tokens + gate2 * p.linear(hidden, f"{block}.feed_forward.w2")
    return picture(p.last(tokens, condition), x, patch)


def jit(state, x, t, y, start):
    """state: a JiT's; the label's tokens enter before block `start`; x (N, 3, H, W); t, y (N,)
    → the clean picture (N, 3, H, W) float64.
    """
    p = Weights(state)
    kernel = p["x_embedder.proj1.weight"]
    condition = p.condition(t, y)
    label = p["y_embedder.embedding_table.weight"][y]
    tokens = (
        cut(x, kernel.shape[-1]) @ kernel.flatten(1).T @ p["x_embedder.proj2.weight"].flatten(1).T
    )
    tokens = tokens + p["x_embedder.proj2.bias"] + p["pos_embed"]
    d = len(p["blocks.0.attn.q_norm.weight"])
    by_place = (angles(positions, d // 2) for positions in places(round(tokens.shape[1] ** 0.5)))
    rotation = torch.cat([*by_place], 1)
    front = 0
    for b in range(p.depth("attn.qkv.weight")):
        if b == start:
            positions = p["in_context_posemb"]
            front = positions.shape[1]
            tokens = torch.cat([positions + label[:, None], tokens], 1)
            rotation = torch.cat([torch.zeros(front, d // 2), rotation])
        tokens = jit_block(p, f"blocks.{b}", tokens, condition, rotation, d)
    tokens = tokens[:, front:]
    shift, scale = p.linear(condition, "final_layer.adaLN_modulation.1")[:, None].chunk(2, -1)
    h = normed(tokens, 1e-6, p["final_layer.norm_final.weight"], centre=False) * (1 + scale) + shift
    return picture(p.linear(h, "final_layer.linear"), x, kernel.shape[-1])


def rae(state, x, t, y, trunk):
    """state: a DiT^DH's, whose trunk has so many blocks; x (N, C, H, W); t (N,), 0 at data and 1 at
    noise; y (N,) → noise − data (N, C, H, W) float64.
    """
    p = Weights(state)
    angles_of_time = 2 * math.pi * torch.outer(t.double(), p["t_embedder.W"])
    time = torch.cat([angles_of_time.sin(), angles_of_time.cos()], 1)
    time = p.linear(silu(p.linear(time, "t_embedder.mlp.0")), "t_embedder.mlp.2")
    condition = silu(silu(time + p["y_embedder.embedding_table.weight"][y]))
    pixels = x.double().flatten(2).mT  # (N, T, C)
    kernels = {name: p[f"{name}_embedder.proj.weight"].flatten(1) for name in "sx"}
    tokens = pixels @ kernels["s"].T + p["s_embedder.proj.bias"] + p["pos_embed"]
    for b in range(p.depth("attn.qkv.weight")):
        if b == trunk:
            s = p.linear(silu(time[:, None] + tokens), "s_projector")
            condition = silu(s)
            tokens = pixels @ kernels["x"].T + p["x_embedder.proj.bias"]
        rope = "enc_feat_rope" if b < trunk else "dec_feat_rope"
        d = p[f"{rope}.freqs_cos"].shape[1]
        by_place = (angles(positions, d // 2) for positions in places(x.shape[-1]))
        tokens = jit_block(p, f"blocks.{b}", tokens, condition, torch.cat([*by_place], 1), d)
    shift, scale = p.linear(condition, "final_layer.adaLN_modulation.1").chunk(2, -1)
    h = normed(tokens, 1e-6, p["final_layer.norm_final.weight"], centre=False) * (1 + scale) + shift
    return picture(p.linear(h, "final_layer.linear"), x, 1)


def jit_block(p, block, tokens, condition, rotation, d):
    m = p.linear(condition, f"{block}.adaLN_modulation.1")
    m = (m if m.ndim == 3 else m[:, None]).chunk(6, -1)
    shift1, scale1, gate1, shift2, scale2, gate2 = m
    h = normed(tokens, 1e-6, p[f"{block}.norm1.weight"], centre=False) * (1 + scale1) + shift1
    q, k, v = p.linear(h, f"{block}.attn.qkv").chunk(3, -1)
    if f"{block}.attn.q_norm.weight" in p.state:
        norms = (p[f"{block}.attn.{name}_norm.weight"] for name in "qk")
        q, k = (
            normed(one.unflatten(-1, (-1, d)), 1e-6, norm, centre=False).flatten(2)
            for one, norm in zip((q, k), norms)
        )
    mixed = attention(turned(q, rotation), turned(k, rotation), v, d)
    tokens = tokens + gate1 * p.linear(mixed, f"{block}.attn.proj")
    h = normed(tokens, 1e-6, p[f"{block}.norm2.weight"], centre=False) * (1 + scale2) + shift2
    first, second = p.linear(h, f"{block}.mlp.w12").chunk(2, -1)
    return tokens + gate2 * p.linear(silu(first) * second, f"{block}.mlp.w3")


def lightning_dit(state, x, t, y):
    """state: a LightningDiT's file; x (N, C, H, W); t, y (N,) → (N, C, H, W) float64."""
    p = Weights(state)
    kernel = p["x_embedder.proj.weight"]
    condition = p.condition(t, y)
    d = p["feat_rope.freqs_cos"].shape[1]
    tokens = (
        cut(x, kernel.shape[-1]) @ kernel.flatten(1).T + p["x_embedder.proj.bias"] + p["pos_embed"]
    )
    by_place = (angles(positions, d // 2) for positions in places(round(tokens.shape[1] ** 0.5)))
    rotation = torch.cat([*by_place], 1)  # the first half by row
    for b in range(p.depth("attn.qkv.weight")):
        block = f"blocks.{b}"
        m = p.linear(condition, f"{block}.adaLN_modulation.1")[:, None].split(len(kernel), -1)
        scale1, gate1, scale2, gate2 = m if len(m) == 4 else (m[1], m[2], m[4], m[5])
        shift1, shift2 = (0, 0) if len(m) == 4 else (m[0], m[3])
        h = normed(tokens, 1e-6, p[f"{block}.norm1.weight"], centre=False) * (1 + scale1) + shift1
        q, k, v = p.linear(h, f"{block}.attn.qkv").chunk(3, -1)
        if f"{block}.attn.q_norm.weight" in p.state:
            norms = (p[f"{block}.attn.{name}_norm.weight"] for name in "qk")
            q, k = (
                normed(one.unflatten(-1, (-1, d)), 1e-6, norm, centre=False).flatten(2)
                for one, norm in zip((q, k), norms)
            )
        mixed = attention(turned(q, rotation), turned(k, rotation), v, d)
        tokens = tokens + gate1 * p.linear(mixed, f"{block}.attn.proj")
        h = normed(tokens, 1e-6, p[f"{block}.norm2.weight"], centre=False) * (1 + scale2) + shift2
        first, second = p.linear(h, f"{block}.mlp.w12").chunk(2, -1)
        tokens = tokens + gate2 * p.linear(silu(first) * second, f"{block}.mlp.w3")
    shift, scale = p.linear(condition, "final_layer.adaLN_modulation.1")[:, None].chunk(2, -1)
    h = normed(tokens, 1e-6, p["final_layer.norm_final.weight"], centre=False) * (1 + scale) + shift
    return picture(p.linear(h, "final_layer.linear"), x, kernel.shape[-1])[:, : x.shape[1]]
