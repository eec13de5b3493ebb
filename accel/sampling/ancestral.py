"""One network evaluation a step:

    x_{t-1} = mean(x_t, network(x_t, t, y)) + [t ≠ 0] · sigma · noise,    t = T-1 … 0

Ancestral sampling (Ho et al. 2020, arXiv:2006.11239, algorithm 2) and DDIM (Song et al. 2021, arXiv:2010.02502), of a
process that `diffusion` defines.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from accel.diffusion.respace import SpacedDiffusion
from accel.sampling.process import Kind, Process, State


@dataclass(frozen=True)
class Ancestral(Process):
    """Ancestral sampling of `diffusion`."""

    diffusion: SpacedDiffusion

    @property
    def moves(self) -> list[Kind]:
        return [(1, 1)] * self.diffusion.num_timesteps

    def times(self) -> list[int]:
        return self.diffusion.timestep_map[::-1]

    def levels(self) -> list[float]:
        return [time / self.diffusion.original_num_steps for time in self.times()]

    def prepare(self, device) -> None:
        self.diffusion.prepare(device)
        self._coefficients(device)

    def move(self, kind, state, at, noise, evaluate) -> State:
        (x,), t = state, self.diffusion.num_timesteps - 1 - at  # (n,)
        if evaluate.network.fuses_update and self.diffusion.learns_range:
            from accel.kernels.ancestral_update import ancestral_update  # brings Triton: other tiers need not wait

            guidance, coefficients = evaluate.guidance[0], self._coefficients(x.device)
            tokens = evaluate.tokens(x)
            return (ancestral_update(tokens, x, noise[0], t, coefficients, guidance.scale, guidance.channels),)
        return (self._step(lambda x, t: evaluate(x), x, t, noise[0])["sample"],)

    def _step(self, model, x: Tensor, t: Tensor, noise: Tensor) -> dict:
        return self.diffusion.p_sample(model, x, t, clip_denoised=False, noise=noise)

    def _coefficients(self, device: torch.device) -> Tensor:
        """Of `_step`, as the fused kernel reads them."""
        return self.diffusion.ancestral_coefficients(device)


@dataclass(frozen=True)
class Ddim(Ancestral):
    """DDIM; eta: the noise of a step, from 0, none, to 1, as much as ancestral sampling draws."""

    eta: float = 0.0

    def _step(self, model, x, t, noise):
        return self.diffusion.ddim_sample(model, x, t, clip_denoised=False, eta=self.eta, noise=noise)

    def _coefficients(self, device):
        return self.diffusion.ddim_coefficients(device, self.eta)
