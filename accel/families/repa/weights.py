"""Identify REPA's SiT from its weights, and convert them to a SiT's (Yu et al. 2024,
arXiv:2410.06940).

REPA's network is a SiT with reversed time: s = 1 − t runs from data to noise, and the output is
noise − data. The weights can absorb both, up to rounding. Negating the last layer reverses the
velocity. cos(f·s) and sin(f·s) are linear in cos(f·t) and sin(f·t), so the linear layer after the
timestep's sinusoid absorbs the change of time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accel.families import repa
from accel.families.dit.network import TimestepEmbedder
from accel.families.dit.weights import NETWORK, identify
from accel.families.repa import PROJECTORS
from accel.families.sit.network import SiT, SiT_models
from accel.families.spec import CallAdapter, FamilyWeights, StateDict
from accel.tensors.tables import PAIRS

PREFIX = "REPA-"  # of our model names: REPA's own names are SiT's
FIRST = "t_embedder.mlp.0.weight"  # (D, F), after the timestep's sinusoid
ARGUMENTS: dict[str, tuple | str | None] = {
    **NETWORK,
    "model": "model",
    "resolution": "image_size",
    "path_type": ("linear",),
    "prediction": ("v",),
    "qk_norm": (False,),
    **dict.fromkeys(("enc_type", "encoder_depth", "decoder_hidden_size", "z_dims")),
    **dict.fromkeys(("projector_dim", "use_cfg", "fused_attn", "proj_coeff", "cfg_prob")),
    **dict.fromkeys(("weighting", "legacy", "data_dir", "output_dir", "exp_name", "logging_dir")),
    **dict.fromkeys(("report_to", "sampling_steps", "resume_step", "steps", "batch_size")),
    **dict.fromkeys(("allow_tf32", "mixed_precision", "epochs", "max_train_steps", "seed")),
    **dict.fromkeys(("checkpointing_steps", "gradient_accumulation_steps", "learning_rate")),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_weight_decay", "adam_epsilon")),
    **dict.fromkeys(("max_grad_norm", "num_workers")),
}


MODELS = {PREFIX + name: SiT_models[name] for name in SiT_models if "Demo" not in name}


def sampled(state: StateDict) -> StateDict:
    """Drop the projectors, which sampling does not need."""
    return {name: value for name, value in state.items() if not name.startswith(PROJECTORS)}


def convert(state: StateDict) -> StateDict:
    """Convert to a SiT with the same samples: reverse time and velocity. Drop the statistics of
    latents that checkpoints of REPA-E contain (Leng et al. 2025, arXiv:2504.10483).
    """
    state = sampled(state)
    for pair in PAIRS:
        if state.keys() >= {*pair}:  # a single table is an unexpected entry: an error later
            state = {name: value for name, value in state.items() if name not in pair}
    for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
        if name in state:
            state[name] = -state[name]
    if FIRST in state:
        state[FIRST] = _of_time_turned(state[FIRST])
    return state


def of_module(module: Any, state: StateDict) -> tuple[dict[str, Any], CallAdapter]:
    """Return the facts of REPA's SiT, and its call adapter. A module with a list of projectors,
    even an empty one, also returns features.
    """
    adapter = called_reversed(module)
    if hasattr(module, "projectors"):
        adapter = adapter._replace(forward=_with_features)
    return {"num_heads": module.num_heads}, adapter


def called_reversed(module: Any) -> CallAdapter:
    """Return the call adapter of a SiT with reversed time and velocity."""
    return CallAdapter(
        module,
        inputs=lambda x, t, y: ((x, 1 - t, y), {}),
        output=lambda out: -(out[0] if isinstance(out, tuple) else out),
        forward=_reversed,
        forward_with_cfg=_reversed,
    )


def _reversed(
    method: Callable[..., Tensor], x: Tensor, t: Tensor, y: Tensor, *others: Any, **named: Any
) -> Tensor:
    """Return the reversed velocity (N, C, H, W)."""
    return -method(x, 1 - t, y, *others, **named)


def _with_features(*arguments: Any, **named: Any) -> tuple[Tensor, tuple]:
    """Return (reversed velocity (N, C, H, W), ()); REPA's features are only for training."""
    return _reversed(*arguments, **named), ()


def _of_time_turned(weight: Tensor) -> Tensor:
    """Return W' (D, F) with W' · sinusoid(t) = weight · sinusoid(1 − t). It is its own inverse."""
    at_one = TimestepEmbedder.timestep_embedding(
        torch.ones(1, device=weight.device), weight.shape[1]
    )
    # cos(f) and sin(f) of the frequencies f, each (1, F/2)
    cos, sin = at_one.double().chunk(2, dim=1)
    of_cos, of_sin = weight.double().chunk(2, dim=1)  # each (D, F/2)
    turned = torch.cat([of_cos * cos + of_sin * sin, of_cos * sin - of_sin * cos], dim=1)
    return turned.to(torch.promote_types(weight.dtype, torch.float32))


WEIGHTS = FamilyWeights(
    models=MODELS,
    identify=partial(identify, repa.FAMILY, SiT, MODELS),
    of_module=of_module,
    arguments=ARGUMENTS,
    convert=convert,
    sampled=sampled,
)
