"""Samplers of flows, which run from noise at t = 0 to data at t = 1.

On the linear path x_t = t·x* + (1 − t)·ε the network estimates the velocity v = x* − ε (SiT, Ma
et al. 2024, arXiv:2401.08740). In N steps:

    Euler   x ← x + Δt·v(x, t)                                    even or shifted times
    Heun    x ← x + Δt·(v(x, t) + v(x', t + Δt))/2                x' is Euler's; last step: Euler
    Sde     x ← x + Δt·((1 + t)·v − x) + √(2·(1 − t)·Δt)·noise    N − 1 even steps to t = 0.96, then
                                                                  one of 0.04 without noise

The SDE's drift is v + w·score, with score = (t·v − x)/(1 − t) and SiT's diffusion w = 1 − t, the
noise level. A shift s moves even times t to s·t / (1 + (s − 1)·t): s < 1 shortens the steps near
noise. The even times of an ODE may end before 1, RAE's at 0.999 (Zheng et al. 2025,
arXiv:2510.11690).

A network may estimate the data x̂ in place of the velocity (Li & He 2025, arXiv:2511.13720): then
v = (x̂ − x) / max(1 − t, ε). That is linear in x̂, as guidance is, so guidance may come first.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from accel.families import IntervalRule
from accel.sampling.guidance import shifted, step_levels
from accel.sampling.process import Process, State

LAST_STEP = 0.04  # length of the SDE's last step, SiT's default


@dataclass(frozen=True)
class Euler(Process):
    """Solve the flow's ODE by Euler's method.

    shift: of the times; 1 keeps them even. t_eps: lower bound of the divisor 1 − t for networks
    that estimate the data; None: the network estimates the velocity. noise_scale: scale of the
    first noise. heun_by_start: whether Heun's method guides both evaluations of a step by the
    noise level at its start, or each by its own level. last_time: the end of the even times;
    below 1 some noise is left. interval_rule: rounding of `noise_levels`
    (accel/sampling/guidance.py). starts_at_one: whether the first noise level is exactly 1, which
    every interval up to 1 includes, or as the shift rounds it, which may be above 1.
    """

    steps: int
    shift: float = 1.0
    t_eps: float | None = None
    noise_scale: float = 1.0
    heun_by_start: bool = True
    last_time: float = 1.0
    interval_rule: IntervalRule = "float64 levels"
    starts_at_one: bool = True

    @property
    def noise_draws(self) -> int:
        return 0

    def _boundaries(self) -> list[float]:
        """Return the N + 1 times at which steps start or end."""
        steps = self.steps
        return [shifted(self.last_time * i / steps, self.shift) for i in range(steps + 1)]

    def times(self) -> list[float]:
        return self._boundaries()[:-1]

    def noise_levels(self) -> list[float]:
        levels = step_levels(self.interval_rule, self.steps, self.last_time, self.shift)
        if self.starts_at_one:
            levels[0] = 1
        return levels[:-1].tolist()

    def lengths(self) -> list[float]:
        """Return the step length of every evaluation, in order."""
        return np.diff(self._boundaries()).tolist()

    def coefficients(self) -> list:
        """Return two lists: the step length and the divisor max(1 − t, ε) of every evaluation."""
        return [self.lengths(), [max(1 - t, self.t_eps or 1.0) for t in self.times()]]

    def begin(self, x) -> State:
        return (self.noise_scale * x,)

    def predict_latents(self, x, t, out) -> Tensor:
        return x + (self._boundaries()[-1] - t) * out if self.t_eps is None else out

    def _length(self, x, index):
        """Return the step length: a number, or (n, 1, 1, 1) on x's device."""
        if self.shift == 1:
            return self.last_time / self.steps
        return _upload(self, x.device)[0, index, None, None, None]

    def _velocity(self, evaluate, x, index):
        """Evaluate the velocity at x (n, C, H, W). index (n,): of the evaluation."""
        out = evaluate(x)
        if self.t_eps is None:
            return out
        return (out - x) / _upload(self, x.device)[1, index, None, None, None]

    def step(self, state, index, noise, networks) -> State:
        (x,) = state
        (evaluate,) = networks
        return (x + self._length(x, index) * self._velocity(evaluate, x, index),)


class Heun(Euler):
    """Solve the flow's ODE by Heun's method."""

    @property
    def evaluation_counts(self) -> list[int]:
        return [2] * (self.steps - 1) + [1]

    def times(self) -> list[float]:
        """Return the times at both ends of every step but the last, and at that one's start."""
        return np.repeat(super().times(), 2)[1:].tolist()

    def noise_levels(self) -> list[float]:
        levels = np.repeat(super().noise_levels(), 2)
        return (levels[:-1] if self.heun_by_start else levels[1:]).tolist()

    def lengths(self) -> list[float]:
        return np.repeat(super().lengths(), 2)[:-1].tolist()

    def step(self, state, index, noise, networks) -> State:
        if len(networks) == 1:  # the last step
            return super().step(state, index, noise, networks)
        (x,) = state
        evaluate_start, evaluate_end = networks
        length = self._length(x, index)
        v_start = self._velocity(evaluate_start, x, index)
        v_end = self._velocity(evaluate_end, x + length * v_start, index + 1)
        return (x + length / 2 * (v_start + v_end),)


class Sde(Euler):
    """Solve the SDE with the flow's marginals by the Euler–Maruyama method.

    steps: at least 2. The times are not shifted, and the network estimates the velocity.
    """

    noise_from_cpu = True

    @property
    def noise_draws(self) -> int:
        return self.steps - 1

    def times(self) -> list[float]:
        return [i * (1 - LAST_STEP) / (self.steps - 1) for i in range(self.steps)]

    def noise_levels(self) -> list[float]:
        return torch.linspace(1, LAST_STEP, self.steps, dtype=torch.float64).tolist()

    def coefficients(self) -> list:
        """Return three lists: the coefficients of x, v and the noise at every evaluation."""
        *starts, last = self.times()
        step = (1 - LAST_STEP) / (self.steps - 1)
        steps = [(1 - step, step * (1 + t), (2 * (1 - t) * step) ** 0.5) for t in starts]
        # The last step gets the noise of the step before again, and multiplies it by zero.
        steps.append((1 - LAST_STEP, LAST_STEP * (1 + last), 0.0))
        return [list(column) for column in zip(*steps)]

    def step(self, state, index, noise, networks) -> State:
        (x,) = state
        (evaluate,) = networks
        x_scale, v_scale, noise_scale = _upload(self, x.device)[
            :, index, None, None, None
        ]  # each (n, 1, 1, 1)
        return (x_scale * x + v_scale * evaluate(x) + noise_scale * noise,)


FLOWS = {"euler": Euler, "heun": Heun, "sde": Sde}


@lru_cache(maxsize=None)  # captured steps read the tables at fixed addresses
def _upload(process: Euler, device: torch.device) -> Tensor:
    """Upload the process's coefficients (…, evaluations), once per device."""
    with torch.inference_mode(False):  # later callers may be in another mode
        return torch.tensor(process.coefficients(), dtype=torch.float64).float().to(device)
