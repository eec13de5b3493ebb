"""ViT decoders with random weights in files, and their mathematics in float64."""

import json
import math

import torch

from accel.decoders.vit.network import Sizes, ViTDecoder

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SMALL = Sizes(channels=16, side=4, patch=4, width=48, depth=3, heads=4, mlp=96, eps=1e-12)


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator)


def random_state(sizes=SMALL, seed=0):
    """Return the state dict of a published file: random, values about one everywhere."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, value in ViTDecoder(sizes).state_dict().items():
        if name.startswith(("latent_", "image_")):
            continue
        values = draw(generator, *value.shape)
        if name.endswith("weight") and value.ndim == 2:
            values = 1.5 * values / value.shape[1] ** 0.5
        elif "norm" in name and name.endswith("weight"):
            values = 1 + 0.2 * values
        else:
            values = 0.2 * values
        state[name] = values
    return state


def random_statistics(sizes=SMALL, seed=1):
    """Return the statistics of every latent position, some of the variances almost 0."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sizes.channels, sizes.side, sizes.side)
    return {"mean": draw(generator, *shape), "var": draw(generator, *shape) ** 2}


def vit_files(folder, sizes=SMALL, statistics=True, **facts):
    """Write a decoder as it is published, and return its path. facts: of its config.json."""
    folder.mkdir(exist_ok=True)
    torch.save(random_state(sizes), folder / "model.pt")
    if statistics:
        torch.save(random_statistics(sizes), folder / "stat.pt")
    facts = {"decoder_num_attention_heads": sizes.heads, "hidden_size": "ignored", **facts}
    (folder / "config.json").write_text(json.dumps(facts))
    return folder / "model.pt"


def written_out(z, sizes=SMALL, mean=IMAGENET_MEAN, std=IMAGENET_STD):
    """Return v (n, 3, H, W) in float64, about (0, 1), of latents by the decoder of `vit_files`."""
    w = {name: value.double() for name, value in random_state(sizes).items()}
    stats = {name: value.double() for name, value in random_statistics(sizes).items()}

    def linear(x, name):
        return torch.einsum("...i,oi->...o", x, w[f"{name}.weight"]) + w[f"{name}.bias"]

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + sizes.eps).sqrt()
        return centred / deviation * w[f"{name}.weight"] + w[f"{name}.bias"]

    def attention(x, name):
        parts = []
        for part in ("query", "key", "value"):
            parts.append(linear(x, f"{name}.attention.{part}").unflatten(-1, (sizes.heads, -1)))
        q, k, v = parts  # each (n, T, H, d)
        scores = torch.einsum("nqhd,nkhd->nhqk", q, k) / math.sqrt(q.shape[-1])
        out = torch.einsum("nhqk,nkhd->nqhd", scores.softmax(-1), v).flatten(2)
        return linear(out, f"{name}.output.dense")

    z = z.double() * (stats["var"] + 1e-5).sqrt() + stats["mean"]
    n = len(z)
    tokens = linear(z.permute(0, 2, 3, 1).reshape(n, -1, sizes.channels), "decoder_embed")
    x = torch.cat([w["trainable_cls_token"].expand(n, 1, -1), tokens], 1) + w["decoder_pos_embed"]
    for index in range(sizes.depth):
        layer = f"decoder_layers.{index}"
        x = x + attention(norm(x, f"{layer}.layernorm_before"), f"{layer}.attention")
        h = linear(norm(x, f"{layer}.layernorm_after"), f"{layer}.intermediate.dense")
        h = h * (1 + torch.erf(h / math.sqrt(2))) / 2
        x = x + linear(h, f"{layer}.output.dense")
    values = linear(norm(x, "decoder_norm"), "decoder_pred")[:, 1:]
    p = sizes.patch
    pictures = torch.empty(n, 3, p * sizes.side, p * sizes.side, dtype=torch.float64)
    for index in range(sizes.side**2):
        row, column = divmod(index, sizes.side)
        patch = values[:, index].view(n, p, p, 3).permute(0, 3, 1, 2)
        pictures[:, :, row * p : row * p + p, column * p : column * p + p] = patch
    mean, std = (torch.tensor(values).double().view(3, 1, 1) for values in (mean, std))
    return pictures * std + mean
