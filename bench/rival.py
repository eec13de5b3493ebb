"""The same weights as others run them, in our loop: eager, torch.compile, diffusers."""

import copy
from collections.abc import Callable

import torch

from accel.families.large_dit.network import DiT_Llama
from accel.graphs import Replayed
from accel.network import Network, Plain
from accel.weights.diffusers_layout import config_of, to_diffusers


class Rival(Plain):
    """A plain network as others run it in `dtype`: eager, compile or max-autotune (torch.compile), diffusers. `model`
    becomes of that dtype; guidance and update are those of our loop.

    The blocks of a Large-DiT are compiled one by one and share a compilation, since the whole keeps the compiler busy
    for many minutes; a CUDA graph then holds a step. diffusers' timestep frequencies differ (shift 1), and so its
    output.
    """

    def __init__(self, what: str, model: torch.nn.Module, dtype: torch.dtype, device: torch.device):
        super().__init__(model.to(dtype))
        self.evaluate = super().tokens
        if what == "diffusers":
            from diffusers import DiTTransformer2DModel

            state = model.state_dict()
            with torch.device(device):
                self.transformer = DiTTransformer2DModel.from_config(
                    config_of(state, model.num_heads, model.x_embedder.img_size[0], model.y_embedder.num_classes)
                )
            self.transformer.load_state_dict(to_diffusers(state))
            self.transformer.to(dtype).eval().requires_grad_(False)
            self.evaluate = self._diffusers
        elif what != "eager" and isinstance(model, DiT_Llama):
            for block in model.blocks:
                block.compile(mode="max-autotune-no-cudagraphs", dynamic=False)
            self.evaluate = Replayed(self.evaluate)
        elif what != "eager":
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
