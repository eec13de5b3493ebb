"""Samplers with one network evaluation per step; accel.diffusion has their equations:

x_{t-1} = mean(x_t, network(x_t, t, y)) + [t ≠ 0] · sigma · noise,    t = T-1 … 0
"""

from dataclasses import dataclass

from accel.diffusion.respace import SpacedDiffusion
from accel.sampling.process import Process, State


@dataclass(frozen=True)
class Ancestral(Process):
    """Ancestral sampling (Ho et al. 2020, arXiv:2006.11239, algorithm 2)."""

    diffusion: SpacedDiffusion

    @property
    def evaluation_counts(self) -> list[int]:
        return [1] * self.diffusion.num_timesteps

    def times(self) -> list[int]:
        return self.diffusion.timestep_map[::-1]

    def prepare(self, device) -> None:
        self.diffusion.prepare(device)

    def step(self, state, at, noise, networks) -> State:
        (x,) = state
        (evaluate,) = networks
        t = self.diffusion.num_timesteps - 1 - at  # (n,)
        result = self._sample(
            lambda x, t: evaluate(x),
            x,
            t,
            clip_denoised=False,
            noise=noise,
        )
        return (result["sample"],)

    def _sample(self, *arguments, **options):
        return self.diffusion.p_sample(*arguments, **options)


@dataclass(frozen=True)
class Ddim(Ancestral):
    """DDIM (Song et al. 2021, arXiv:2010.02502). eta: the noise of a step, from 0 (none)
    to 1 (as in ancestral).
    """

    eta: float = 0.0

    def _sample(self, *arguments, **options):
        return self.diffusion.ddim_sample(*arguments, eta=self.eta, **options)
