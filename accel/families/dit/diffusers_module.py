"""Read diffusers' DiTTransformer2DModel: DiT's network with other names, arguments and
timestep frequencies.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from accel.families import dit
from accel.families.dit.network import cached_table
from accel.families.spec import Face, ModuleRules
from accel.tensors.diffusers_names import check_config, from_diffusers, with_table


def of_module(module: nn.Module) -> ModuleRules:
    """Return the rules to read the module. Raises ValueError for a configuration that is
    not a DiT's.
    """
    config: dict[str, Any] = dict(module.config)  # type: ignore[arg-type]
    return ModuleRules(
        dit.FAMILY,
        check_config(config, from_diffusers(module.state_dict())),
        read=lambda state: with_table(from_diffusers(state), config["sample_size"]),
        arguments=lambda x, t, y: ((x,), dict(timestep=t, class_labels=y)),
        output=lambda out: out.sample,
        timestep_embedding=timestep_embedding,
        face=TransformerFace,
    )


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


class TransformerFace(Face):
    """DiTTransformer2DModel's signature over `accelerated.Accelerated`, for
    `pipe.transformer = accelerate(pipe.transformer)`.

    `__class__` is diffusers' own class, since pipelines check it to move and save their
    parts.
    """

    def __init__(self, held: Any, *arguments: Any):
        self.config = held.module.config
        self.dtype = held.module.dtype
        self._kind = type(held.module)
        self.__module__ = self._kind.__module__  # pipelines read the library's name from it
        super().__init__(held, *arguments)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._kind

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        class_labels: Tensor,
        cross_attention_kwargs: None = None,
        return_dict: bool = True,
    ) -> Any:
        """Evaluate the network as DiTTransformer2DModel.forward does: hidden_states (N,
        C, H, W), timestep (N,), class_labels (N,) → an object with `sample` (N, C', H,
        W), or the tuple (sample,).
        """
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        sample = super().forward(hidden_states, timestep, class_labels)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def modules(self) -> Iterator:
        """Return no submodules: pipelines search them for hooks."""
        return iter(())
