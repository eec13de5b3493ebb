"""DiT in the layout of diffusers: a folder with config.json and weights under DiTTransformer2DModel's names."""

import os
from pathlib import Path
from typing import Any

import torch

from accel.errors import UsageError, path_errors
from accel.weights.tensor_files import read_json, read_tensors, require_floats
from models import DiT_models, get_2d_sincos_pos_embed

# Ours → diffusers'. It keeps a copy of both embedders in every block, and q, k, v apart.
_OUTER = {
    "x_embedder.proj": "pos_embed.proj",
    "final_layer.adaLN_modulation.1": "proj_out_1",
    "final_layer.linear": "proj_out_2",
}
_EMBEDDERS = {
    "t_embedder.mlp.0.weight": "emb.timestep_embedder.linear_1.weight",
    "t_embedder.mlp.0.bias": "emb.timestep_embedder.linear_1.bias",
    "t_embedder.mlp.2.weight": "emb.timestep_embedder.linear_2.weight",
    "t_embedder.mlp.2.bias": "emb.timestep_embedder.linear_2.bias",
    "y_embedder.embedding_table.weight": "emb.class_embedder.embedding_table.weight",
}
_BLOCK = {
    "attn.proj": "attn1.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    "adaLN_modulation.1": "norm1.linear",
}
_KINDS = ("weight", "bias")
WEIGHTS, PICKLED = "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """State dict of models.DiT from a folder that holds config.json and weights. Raises UsageError about --ckpt."""
    state = {}
    for file in weight_files(folder, "--ckpt"):
        state |= read_tensors(file, "--ckpt")
    require_floats(state, "--ckpt", folder)
    config = read_json(folder / "config.json", "--ckpt")
    sizes = config.get("sample_size"), config.get("patch_size")
    if not all(type(size) is int and 0 < size <= 4096 for size in sizes):
        raise UsageError(
            f"--ckpt {folder / 'config.json'}: sample_size and patch_size are {sizes}, not two sizes; copy it again"
        )
    return from_diffusers(state, *sizes)


def weight_files(folder: Path, flag: str) -> list[Path]:
    """The weights beside a config.json: one file, or shards; .safetensors rather than .bin. Raises UsageError."""
    with path_errors(flag, folder):
        names = os.listdir(folder)
    others = sorted(name for name in names if name.endswith(".safetensors"))
    for plain in (WEIGHTS, PICKLED):
        index = f"{plain}.index.json"
        if index in names:
            shards = read_json(folder / index, flag).get("weight_map")
            found = {str(name) for name in shards.values()} if isinstance(shards, dict) else set()
            missing = ", ".join(sorted(found - set(names)))  # a name with a slash is never there
            if missing or not found:
                raise UsageError(f"{flag} {folder}: lacks {missing or 'the files'} that {index} names; copy it again")
            return [folder / name for name in sorted(found)]
        if plain in names and "config.json" in names:
            return [folder / plain]
    if len(others) > 1:
        raise UsageError(f"{flag} {folder}: {', '.join(others)} conflict; keep one of them")
    if not others or "config.json" not in names:
        raise UsageError(f"{flag} {folder}: must hold config.json and {WEIGHTS}")
    return [folder / others[0]]


def to_diffusers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """State dict of models.DiT → the one of diffusers, without the position table, which diffusers computes."""
    depth = 1 + max(int(key.split(".")[1]) for key in state if key.startswith("blocks."))
    out = {f"{theirs}.{kind}": state[f"{ours}.{kind}"] for ours, theirs in _OUTER.items() for kind in _KINDS}
    for n in range(depth):
        ours, theirs = f"blocks.{n}", f"transformer_blocks.{n}"
        out.update({f"{theirs}.norm1.{key}": state[name] for name, key in _EMBEDDERS.items()})
        out.update({f"{theirs}.{b}.{kind}": state[f"{ours}.{a}.{kind}"] for a, b in _BLOCK.items() for kind in _KINDS})
        for kind in _KINDS:
            for name, part in zip("qkv", state[f"{ours}.attn.qkv.{kind}"].chunk(3)):
                out[f"{theirs}.attn1.to_{name}.{kind}"] = part
    return out


def from_diffusers(state: dict[str, torch.Tensor], sample_size: int, patch_size: int) -> dict[str, torch.Tensor]:
    """The inverse of `to_diffusers`; the position table is that of a grid of sample_size / patch_size.

    Raises UsageError if an entry is missing or the blocks' copies of the embedders differ.
    """
    try:
        numbers = (int(key.split(".")[1]) for key in state if key.startswith("transformer_blocks."))
        depth = 1 + max(numbers, default=0)
        out = {f"{ours}.{kind}": state[f"{theirs}.{kind}"] for ours, theirs in _OUTER.items() for kind in _KINDS}
        for name, key in _EMBEDDERS.items():
            copies = [state[f"transformer_blocks.{n}.norm1.{key}"] for n in range(depth)]
            if not all(torch.equal(copies[0], copy) for copy in copies[1:]):
                raise UsageError(f"--ckpt: the blocks' copies of {key} differ; such a model is not a DiT")
            out[name] = copies[0]
        for n in range(depth):
            ours, theirs = f"blocks.{n}", f"transformer_blocks.{n}"
            for a, b in _BLOCK.items():
                out |= {f"{ours}.{a}.{kind}": state[f"{theirs}.{b}.{kind}"] for kind in _KINDS}
            for kind in _KINDS:
                qkv = [state[f"{theirs}.attn1.to_{name}.{kind}"] for name in "qkv"]
                out[f"{ours}.attn.qkv.{kind}"] = torch.cat(qkv)
        width = out["x_embedder.proj.weight"].shape[0]
        table = get_2d_sincos_pos_embed(width, sample_size // patch_size)
    except UsageError:
        raise
    except (KeyError, ValueError, RuntimeError) as error:
        raise UsageError(f"--ckpt: not a DiT in diffusers' layout ({error})") from None
    out["pos_embed"] = torch.from_numpy(table).to(out["x_embedder.proj.weight"].dtype).unsqueeze(0)
    return out


def config_of(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """config.json of diffusers' DiTTransformer2DModel for a state dict of models.DiT, where it is not the default.

    No tensor holds the number of heads: it is that of the model in DiT_models with this width and depth. Raises
    UsageError if there is none.
    """
    width, channels, patch_size, _ = state["x_embedder.proj.weight"].shape
    depth = sum(name.endswith("attn.qkv.weight") for name in state)
    with torch.device("meta"):
        models = [build() for build in DiT_models.values()]
    heads = {(model.pos_embed.shape[-1], len(model.blocks)): model.num_heads for model in models}.get((width, depth))
    if heads is None:
        raise UsageError(f"--ckpt: width {width} and depth {depth} are no model of {', '.join(DiT_models)}")
    return {
        "_class_name": "DiTTransformer2DModel",
        "attention_head_dim": width // heads,
        "in_channels": channels,
        "norm_eps": 1e-6,
        "num_attention_heads": heads,
        "num_embeds_ada_norm": len(state["y_embedder.embedding_table.weight"]) - 1,
        "num_layers": depth,
        "out_channels": state["final_layer.linear.weight"].shape[0] // patch_size**2,
        "patch_size": patch_size,
        "sample_size": round((state["pos_embed"].numel() / width) ** 0.5) * patch_size,
    }
