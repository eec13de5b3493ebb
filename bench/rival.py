"""Other implementations of a network for the same weights and loop: eager, torch.compile, diffusers."""

import copy
from collections.abc import Callable

import torch

from accel.graphs import Replayed
from accel.network import Network, Plain
from accel.weights.diffusers_layout import config_of, to_diffusers

RIVALS = "eager", "compile", "max-autotune", "diffusers"
LARGE = 10**9  # parameters above which the compiler would be busy with the whole network for many minutes


class Rival(Plain):
    """A plain network in `dtype` as others run it: one of RIVALS. `model` is converted to that dtype; guidance and
    update are those of our loop. eager runs under autocast.

    A LARGE network's blocks are compiled one by one and share a compilation; a CUDA graph then holds a step. diffusers
    embeds timesteps at other frequencies (shift 1), so its output differs.
    """

    def __init__(self, what: str, model: torch.nn.Module, dtype: torch.dtype, device: torch.device):
        super().__init__(model.to(dtype))
        self.evaluate = super().tokens
        if what == "eager":
            self.evaluate = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)(self.evaluate)
        elif what == "diffusers":
            from diffusers import DiTTransformer2DModel

            state = model.state_dict()
            with torch.device(device):
                self.transformer = DiTTransformer2DModel.from_config(
                    config_of(state, model.num_heads, model.x_embedder.img_size[0], model.y_embedder.num_classes)
                )
            self.transformer.load_state_dict(to_diffusers(state))
            self.transformer.to(dtype).eval().requires_grad_(False)
            self.evaluate = self._diffusers
        elif sum(value.numel() for value in model.parameters()) > LARGE:
            for block in model.blocks:
                block.compile(mode="max-autotune-no-cudagraphs", dynamic=False)
            self.evaluate = Replayed(self.evaluate)
        else:
            self.evaluate = torch.compile(self.evaluate, mode=what.replace("compile", "default"), dynamic=False)

    @torch.no_grad()
    def _diffusers(self, x, t, y):
        out = self.transformer(torch.cat([x] * (len(y) // len(x))), timestep=t, class_labels=y).sample
        p = self.patch_size  # (N, C, H, W) → (N, T, p·p·C)
        return out.unflatten(3, (-1, p)).unflatten(2, (-1, p)).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)

    def tokens(self, x, t, y) -> torch.Tensor:
        return self.evaluate(x.to(self.dtype), t, y).to(x.dtype, copy=True)  # the compiler's graph will overwrite it

    def schedule(self, times, labels, at_once=1) -> tuple[Network, Callable[..., None]]:
        table, network = torch.tensor(times, device=next(self.parameters()).device), copy.copy(self)
        network.tokens = lambda x, index, y: self.tokens(x, table[index], y)
        return network, lambda *evaluations: None
