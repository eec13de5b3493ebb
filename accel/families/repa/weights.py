"""Identify weights of REPA's SiT, and convert them to a SiT's (Yu et al. 2024,
arXiv:2410.06940).

REPA's network is a SiT in the other direction: time s = 1 − t runs from data to noise,
and the output is noise minus data. Both can be reversed in the weights, exactly but for
rounding: negate the last layer; cos(f·s) and sin(f·s) are linear in cos(f·t) and
sin(f·t), so the linear layer after the timestep's sinusoid can absorb the change of time.
"""

from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from accel.families import repa
from accel.families.dit.network import TimestepEmbedder
from accel.families.dit.weights import NETWORK, identify, of_entries
from accel.families.repa import PROJECTORS
from accel.families.sit.network import SiT, SiT_models
from accel.families.sit.weights import is_sit
from accel.families.spec import STRUCTURE, Face, FamilyWeights, ModuleRules, StateDict
from accel.tensors.latent_statistics import PAIRS, mean_and_deviation

PREFIX = "REPA-"  # of our names: REPA's code calls its models as SiT's does
FIRST = "t_embedder.mlp.0.weight"  # (D, F), after the timestep's sinusoid
# Attributes that only the classes of REPA's code, and classes derived from them, have.
ATTRIBUTES = "path_type", "z_dims", "encoder_depth"
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
    """Return the entries that sampling needs: all but the projectors."""
    return {name: value for name, value in state.items() if not name.startswith(PROJECTORS)}


def latent_settings_of(state: StateDict) -> dict[str, Any]:
    """Return mean and deviation of the latents by channel, where the weights hold them, as those
    of REPA-E do (Leng et al. 2025, arXiv:2504.10483).
    """
    here = {name: state[name].float() for name in chain(*PAIRS) if name in state}
    found = mean_and_deviation(here)
    if found is None:
        return {}
    return {name: tuple(value.flatten().tolist()) for name, value in zip(("mean", "std"), found)}


def convert(state: StateDict) -> StateDict:
    """Return the weights of a SiT with the same samples: reverse time and the velocity's sign."""
    state = sampled(state)
    for pair in PAIRS:
        if state.keys() >= {*pair}:  # one alone is of no use, and is refused
            state = {name: value for name, value in state.items() if name not in pair}
    for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
        if name in state:
            state[name] = -state[name]
    if FIRST in state:
        state[FIRST] = _of_time_turned(state[FIRST])
    return state


def of_module(module: nn.Module, state: StateDict) -> ModuleRules | None:
    """Return the rules to read a SiT of REPA's code, recognised by its projectors or
    attributes, or None for another module.
    """
    # A module with projectors, or a list of none, returns features beside the velocity.
    with_features = hasattr(module, PROJECTORS.rstrip("."))
    known = with_features or any(hasattr(module, name) for name in ATTRIBUTES)
    if not is_sit(module) or not known:
        return None
    return of_entries(
        repa.FAMILY,
        module,
        state,
        strength=STRUCTURE,
        arguments=lambda x, t, y: ((x, 1 - t, y), {}),
        output=lambda out: -(out[0] if isinstance(out, tuple) else out),
        face=TurnedFace if with_features else TurnedFaceAlone,
    )


def _of_time_turned(weight: Tensor) -> Tensor:
    """Return the weight (D, F) whose product with the sinusoid of t is the product of
    `weight` with that of 1 − t. The conversion is its own inverse.
    """
    at_one = TimestepEmbedder.timestep_embedding(
        torch.ones(1, device=weight.device), weight.shape[1]
    )
    # cos(f) and sin(f) of the frequencies f, each (1, F/2)
    cos, sin = at_one.double().chunk(2, dim=1)
    of_cos, of_sin = weight.double().chunk(2, dim=1)  # each (D, F/2)
    turned = torch.cat([of_cos * cos + of_sin * sin, of_cos * sin - of_sin * cos], dim=1)
    return turned.to(torch.promote_types(weight.dtype, torch.float32))


class TurnedFaceAlone(Face):
    """The signature of a SiT whose time and velocity are reversed."""

    def forward(self, x: Tensor, t: Tensor, y: Tensor, *others: Any, **named: Any) -> Any:
        """Return the velocity (N, C, H, W)."""
        return -super().forward(x, 1 - t, y, *others, **named)

    def forward_with_cfg(
        self, x: Tensor, t: Tensor, y: Tensor, cfg_scale: float | Tensor, *others: Any
    ) -> Tensor:
        """Return the guided velocity (2N, C, H, W). Arguments: as for
        models.DiT.forward_with_cfg.
        """
        return -super().forward_with_cfg(x, 1 - t, y, cfg_scale, *others)


class TurnedFace(TurnedFaceAlone):
    """REPA's signature: features come with the velocity."""

    def forward(
        self, x: Tensor, t: Tensor, y: Tensor, *others: Any, **named: Any
    ) -> tuple[Tensor, tuple]:
        """Return (velocity (N, C, H, W), ()): REPA's features are for training."""
        return super().forward(x, t, y, *others, **named), ()


WEIGHTS = FamilyWeights(
    models=MODELS,
    identify=partial(identify, repa.FAMILY, SiT, MODELS),
    of_module=of_module,
    arguments=ARGUMENTS,
    convert=convert,
    sampled=sampled,
    latent_settings_of=latent_settings_of,
)
