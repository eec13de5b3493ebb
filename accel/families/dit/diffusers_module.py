"""Read diffusers' DiTTransformer2DModel: a DiT with different names, arguments and timestep
frequencies.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accel.families.dit.network import cached_table
from accel.families.spec import CallAdapter
from accel.tensors.diffusers_names import check_config, from_diffusers, with_table


def of_module(module: Any) -> tuple[dict[str, Any], CallAdapter]:
    """Return the module's facts and its call adapter. The accelerated copy imitates diffusers'
    class, since pipelines check it when they move and save components. Raises ValueError if the
    configuration is not a DiT's.
    """
    config = dict(module.config)
    kind = type(module)
    adapter = CallAdapter(
        module,
        inputs=lambda x, t, y: ((x,), dict(timestep=t, class_labels=y)),
        output=lambda out: out.sample,
        forward=_forward,
        renamed=lambda state: with_table(from_diffusers(state), config["sample_size"]),
        imitates=kind,
        attributes=dict(
            config=module.config,
            dtype=module.dtype,
            __module__=kind.__module__,  # pipelines derive the library name from it
            modules=tuple,  # pipelines search submodules for hooks
        ),
    )
    facts = check_config(config, from_diffusers(module.state_dict()))
    return {**facts, "timestep_embedding": timestep_embedding}, adapter


def _forward(
    method: Callable[..., Tensor],
    hidden_states: Tensor,
    timestep: Tensor,
    class_labels: Tensor,
    cross_attention_kwargs: None = None,
    return_dict: bool = True,
) -> Any:
    """Evaluate an accelerated copy with the signature of DiTTransformer2DModel.forward.

    hidden_states (N, C, H, W), timestep (N,), class_labels (N,) → an object with `sample`
    (N, C', H, W), or the tuple (sample,).
    """
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    sample = method(hidden_states, timestep, class_labels)
    return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)


@cached_table
def _frequencies(half, device):
    with torch.inference_mode(False):
        return torch.exp(-math.log(10000) * torch.arange(half, device="cpu") / (half - 1)).to(
            device
        )


def timestep_embedding(t: Tensor, dim: int) -> Tensor:
    """Embed timesteps with frequencies 10000^(-i/(half-1)), diffusers' default frequency
    shift of 1; DiT's exponent is -i/half. t (N,) → (N, dim) float32, dim even.
    """
    args = t[:, None].float() * _frequencies(dim // 2, t.device)  # (N, dim/2)
    return torch.cat([args.cos(), args.sin()], dim=-1)
