"""Convert DiT checkpoints from diffusers' tensor names, and check their config.json."""

from itertools import product
from typing import Any

import torch

from accel.errors import as_usage_error, shown
from accel.tensors.tables import sine_cosine

DEFAULT_SIDE = 32  # default of DiTTransformer2DModel's sample_size
SCHEDULE = "scheduler/scheduler_config.json"  # in a pipeline's folder
_PARAMETERS = ("weight", "bias")


def _parameters_of(layers: dict[str, str]) -> dict[str, str]:
    """Map parameter names, ours → diffusers', given the names of the layers."""
    pairs = product(layers.items(), _PARAMETERS)
    return {f"{ours}.{parameter}": f"{theirs}.{parameter}" for (ours, theirs), parameter in pairs}


# Ours → diffusers', which has a copy of both embedders in every block, and separate q, k, v.
_OUTER = _parameters_of(
    {
        "x_embedder.proj": "pos_embed.proj",
        "final_layer.adaLN_modulation.1": "proj_out_1",
        "final_layer.linear": "proj_out_2",
    }
)
_EMBEDDERS = _parameters_of(
    {
        "t_embedder.mlp.0": "emb.timestep_embedder.linear_1",
        "t_embedder.mlp.2": "emb.timestep_embedder.linear_2",
    }
)
_EMBEDDERS["y_embedder.embedding_table.weight"] = "emb.class_embedder.embedding_table.weight"
_BLOCK = _parameters_of(
    {
        "attn.proj": "attn1.to_out.0",
        "mlp.fc1": "ff.net.0.proj",
        "mlp.fc2": "ff.net.2",
        "adaLN_modulation.1": "norm1.linear",
    }
)

# Supported values of config.json. Entries that are not listed must be None or False. norm_eps: DiT
# uses 1e-6, but diffusers' config of the published weights has its default, 1e-5.
COMPUTED = {
    "_class_name": ("DiTTransformer2DModel", "Transformer2DModel"),
    "activation_fn": ("gelu-approximate",),
    "attention_bias": (True,),
    "attention_type": ("default",),
    "norm_eps": (1e-5, 1e-6),
    "norm_type": ("ada_norm_zero",),
}
CLASSES = "num_embeds_ada_norm"
# dropout is only used in training, norm_num_groups in other transformer classes.
WITHOUT_EFFECT = (
    "sample_size",
    "num_attention_heads",
    "dropout",
    "norm_num_groups",
)


def check_config(config: dict[str, Any], state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return family, number of heads and number of classes from a config of DiTTransformer2DModel.
    state: its weights, under DiT's names. Raises ValueError if the config does not fit the weights
    or describes an unsupported network.
    """
    width, channels, patch, _ = state["x_embedder.proj.weight"].shape
    side = config.get("sample_size", DEFAULT_SIDE)
    heads = config.get("num_attention_heads")
    if type(side) is not int or not 0 < side <= 4096 or side % patch:
        raise ValueError(
            f"sample_size is {shown(side)}, must be from 1 to 4096 and a multiple of {patch}, the "
            "patch; copy both again"
        )
    if heads is not None and (type(heads) is not int or heads < 1 or width % heads):
        raise ValueError(
            f"num_attention_heads is {shown(heads)}, which must divide {width}; copy both again"
        )
    sizes = {
        "in_channels": channels,
        "num_layers": sum(name.endswith("attn.qkv.weight") for name in state),
        "out_channels": len(state["final_layer.linear.weight"]) // patch**2,
        "patch_size": patch,
        CLASSES: len(state["y_embedder.embedding_table.weight"]) - 1,
        "attention_head_dim": width // heads if heads else config.get("attention_head_dim"),
    }
    computed = COMPUTED | {name: (size, None) for name, size in sizes.items()}
    for name, value in config.items():
        if name in computed:
            if value not in computed[name]:
                wanted = " or ".join(str(each) for each in computed[name] if each is not None)
                raise ValueError(
                    f"{name} is {shown(value)}, and a DiT with these weights has {wanted}; copy "
                    "both again, since other networks are not supported"
                )
        elif value not in (None, False) and name not in WITHOUT_EFFECT and name[:1] != "_":
            raise ValueError(
                f"{shown(name)} {shown(value)} is unknown and not supported; remove it if it has "
                "no effect"
            )
    return {"family": "DiT", "num_heads": heads, "num_classes": sizes[CLASSES]}


def with_table(state: dict[str, torch.Tensor], side: int) -> dict[str, torch.Tensor]:
    """Add the position table for latents of a side to a state dict under DiT's names."""
    kernel = state["x_embedder.proj.weight"]  # (D, C, p, p)
    table = sine_cosine(side // kernel.shape[-1], len(kernel))
    return {**state, "pos_embed": torch.from_numpy(table).to(kernel)}


def from_diffusers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert diffusers' state dict to that of models.DiT. Raises ValueError if an entry is missing
    or unknown, or if the blocks' copies of the embedders differ.
    """
    rest = {name: value for name, value in state.items() if name != "pos_embed.pos_embed"}
    depth = len({name.split(".")[1] for name in rest if name.startswith("transformer_blocks.")})
    try:
        out = {ours: rest.pop(theirs) for ours, theirs in _OUTER.items()}
        for n in range(depth):
            block = f"transformer_blocks.{n}"
            for ours, theirs in _EMBEDDERS.items():
                copy = rest.pop(f"{block}.norm1.{theirs}")
                if not torch.equal(out.setdefault(ours, copy), copy):
                    raise ValueError(
                        f"the blocks' copies of {theirs} differ, and a DiT has one for all; train "
                        "it in DiT's own layout"
                    )
            for ours, theirs in _BLOCK.items():
                out[f"blocks.{n}.{ours}"] = rest.pop(f"{block}.{theirs}")
            for parameter in _PARAMETERS:
                qkv = [rest.pop(f"{block}.attn1.to_{part}.{parameter}") for part in "qkv"]
                out[f"blocks.{n}.attn.qkv.{parameter}"] = torch.cat(qkv)
    except (KeyError, RuntimeError) as error:
        raise as_usage_error(error) or ValueError(
            f"not a DiT in diffusers' layout ({error})"
        ) from None
    if rest:
        raise ValueError(
            f"{min(rest)} is not of a DiT in diffusers' layout ({len(rest)} such entries)"
        )
    return out
