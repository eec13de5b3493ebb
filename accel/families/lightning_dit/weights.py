"""Identify a LightningDiT from its weights, and convert them to the reference network's."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from accel.families import lightning_dit
from accel.families.blocks import grid_rotation_table
from accel.families.dit.weights import NETWORK, PATCHES
from accel.families.dit.weights import identify as dit_identify
from accel.families.lightning_dit.network import LightningDiT, LightningDiT_models
from accel.families.sit.weights import TRANSPORT
from accel.families.spec import CallAdapter, FamilyWeights, ModelSpec, StateDict, with_heads
from accel.tensors.shapes import Shapes

COS = "feat_rope.freqs_cos"
SIN = "feat_rope.freqs_sin"  # each (T, d), every value twice
MODULATION = ".adaLN_modulation.1."
FAMILY = lightning_dit.FAMILY
MULTIPLIER = 0.18215  # latent scale of a configuration without one
TRANSPORT_ARGUMENTS = {
    **TRANSPORT,
    **dict.fromkeys(("use_cosine_loss", "use_lognorm", "partitial_train", "partial_ratio")),
    "shift_lg": None,
}
# Of create_transport, of the constructor, and of a configuration file ("section.entry").
ARGUMENTS: dict[str, tuple | str | None] = {
    **TRANSPORT_ARGUMENTS,
    **{f"transport.{name}": values for name, values in TRANSPORT_ARGUMENTS.items()},
    **NETWORK,
    "num_heads": None,
    "use_swiglu": (True,),
    "use_rope": (True,),
    "use_rmsnorm": (True,),
    **dict.fromkeys(("use_qknorm", "wo_shift", "use_checkpoint", "ckpt_path")),
    "model.model_type": "model",
    "model.use_swiglu": (True,),
    "model.use_rope": (True,),
    "model.use_rmsnorm": (True,),
    **dict.fromkeys(("model.use_qknorm", "model.wo_shift", "model.in_chans")),
    **dict.fromkeys(("model.use_checkpoint", "vae.model_name", "vae.downsample_ratio")),
    "data.image_size": "image_size",
    "data.num_classes": "num_classes",
    "data.latent_norm": "latent_norm",
    "data.latent_multiplier": "latent_scale",
    **dict.fromkeys(("data.data_path", "data.valid_path", "data.fid_reference_file")),
    **dict.fromkeys(("data.num_workers", "train.max_steps", "train.global_batch_size")),
    **dict.fromkeys(("train.global_seed", "train.output_dir", "train.exp_name", "train.ckpt")),
    **dict.fromkeys(("train.log_every", "train.ckpt_every", "train.weight_init")),
    **dict.fromkeys(("train.resume", "train.use_checkpoint", "optimizer.lr", "optimizer.beta2")),
    "optimizer.max_grad_norm": None,
    "sample.mode": ("ODE",),
    "sample.reverse": (False,),
    "sample.sampling_method": "sampler",
    "sample.num_sampling_steps": "points",
    "sample.cfg_scale": "cfg_scale",
    "sample.cfg_interval_start": "interval_start",
    "sample.timestep_shift": "timestep_shift",
    **dict.fromkeys(("sample.atol", "sample.rtol", "sample.likelihood", "sample.fid_num")),
    "sample.per_proc_batch_size": None,
}
SAMPLING_FACTS = {"sampler", "points", "cfg_scale", "interval_start", "timestep_shift"}
LATENT_FACTS = {"latent_norm", "latent_scale", "image_size"}  # of the section `data`
# Published without a configuration; these values differ from the family's.
RECOMMENDED: dict[str, dict[str, Any]] = {
    "lightningdit-xl-imagenet256-64ep": dict(cfg_scale=10.0, guidance_interval=(0.0, 0.9))
}


def swiglu_ratio(shapes: Shapes, width: int) -> float:
    """Return the constructor's `mlp_ratio`. The hidden width is 2/3 · mlp_ratio · width, rounded
    down.
    """
    hidden = shapes["blocks.0.mlp.w3.weight"][1]
    return (hidden * 3 // 2 + 1.5) / width


def identify(shapes: Shapes, facts: Mapping[str, Any]) -> ModelSpec:
    """Identify a network with a LightningDiT's entries. The rotation table has the head dim."""
    width = shapes[PATCHES][0]
    head = shapes[COS][-1]
    if head % 4 or width % head:
        raise ValueError(
            f"{COS} is {shapes[COS]}, which is no table of heads of a width of {width}; save it "
            "again"
        )
    return dit_identify(
        FAMILY,
        LightningDiT,
        LightningDiT_models,
        shapes,
        facts,
        num_heads=width // head,
        mlp_ratio=swiglu_ratio(shapes, width),
        qk_norm="blocks.0.attn.q_norm.weight" in shapes,
    )


def recipe(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Convert a configuration to recommended settings; without one, return a published file's.

    Its times run from 0 (noise) to 1 (data); noise level = 1 − time. VA-VAE's latents are
    normalised by their statistics, latents of other decoders are scaled.
    """
    settings: dict[str, Any] = {}
    if facts.keys() & SAMPLING_FACTS:
        settings["guidance_interval"] = (0.0, 1.0 - facts.get("interval_start", 0))
        settings["timestep_shift"] = facts.get("timestep_shift") or 1.0
    if "cfg_scale" in facts:
        settings["cfg_scale"] = facts["cfg_scale"]
    if "points" in facts:  # points in time, one more than steps
        settings["num_sampling_steps"] = facts["points"] - 1
    if facts.get("sampler", "euler") != "euler":  # refused, unless the user names another
        settings["sampler"] = facts["sampler"]
    latents = dict(
        latent_scale=facts.get("latent_scale", MULTIPLIER),
        latent_norm=facts.get("latent_norm", False),
    )
    if facts.keys() & LATENT_FACTS and latents != dict(latent_scale=1, latent_norm=True):
        settings |= latents
    return settings or RECOMMENDED.get(name.lower(), {})


def convert(state: StateDict) -> StateDict:
    """Convert to the reference network's state dict. Drop the rotation table, which the network
    computes. Extend modulations of four vectors to six with zero shifts. Raises ValueError if the
    file's rotation table differs from the computed one.
    """
    kept = {name: value for name, value in state.items() if name not in (COS, SIN)}
    if COS in state and not state[COS].is_meta:
        _require_rotations(state)
    for name, value in kept.items():
        of_block = name.startswith("blocks.") and MODULATION in name
        if of_block and len(value) == 4 * len(state[PATCHES]):
            # (2, 2·D, …): scale and gate of attention, then of the MLP
            halves = value.unflatten(0, (2, -1))
            shifts = torch.zeros_like(halves).chunk(2, dim=1)[0]
            kept[name] = torch.cat([shifts, halves], dim=1).flatten(0, 1)
    return kept


def of_module(module: Any, state: StateDict) -> tuple[dict[str, Any], CallAdapter]:
    """Return the facts of a LightningDiT, and its call adapter."""
    facts, adapter = with_heads(module, state)
    adapter = adapter._replace(forward_with_cfg=_from_a_time)
    if not isinstance(module, LightningDiT):
        return facts, adapter
    # This class computes the rotations, so its state dict has none.
    head = len(state[PATCHES]) // module.num_heads
    table = rotations(head, module.x_embedder.grid_size[0])
    return facts, adapter._replace(renamed=lambda state: {**state, **table})


def _from_a_time(
    method: Callable[..., Tensor],
    x: Tensor,
    t: Tensor,
    y: Tensor,
    cfg_scale: float | Tensor,
    cfg_interval: bool | None = None,
    cfg_interval_start: Any = None,
) -> Tensor:
    """Return the guided velocity (2N, C, H, W); with `cfg_interval` the conditional velocity at
    times before `cfg_interval_start`.
    """
    before = cfg_interval is True and t[0] < cfg_interval_start
    return method(x, t, y, 1.0 if before else cfg_scale)


WEIGHTS = FamilyWeights(
    models=LightningDiT_models,
    identify=identify,
    of_module=of_module,
    arguments=ARGUMENTS,
    recipe=recipe,
    convert=convert,
    has_yaml_file=True,
)


def _require_rotations(state):
    """Raise ValueError if a file's rotation table differs from the computed one."""
    tokens, head = state[COS].shape
    for name, want in rotations(head, round(tokens**0.5)).items():
        same_shape = want.shape == state[name].shape
        if not same_shape or (state[name].cpu().float() - want).abs().amax() > 0.02:
            raise ValueError(
                f"{name} has other rotations than those by row and column that are computed here"
            )


def rotations(head: int, side: int) -> StateDict:
    """Return a file's rotation tables for head dim `head` and side² tokens."""
    # (T, d, 2)
    table = grid_rotation_table(head, side, torch.float32, "cpu").repeat_interleave(2, dim=1)
    return dict(zip((COS, SIN), table.unbind(-1)))
