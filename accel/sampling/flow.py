"""Flows: a network that estimates a velocity carries noise at t = 0 to data at t = 1.

On the linear path x_t = t·x* + (1 − t)·ε the velocity v estimates x* − ε (SiT, Ma et al.
2024, arXiv:2401.08740). In N steps:

    Euler   x ← x + Δt·v(x, t)                                    even steps, or shifted ones
    Heun    the same by the mean of v at both ends of a step; the last is Euler's
    Sde     x ← x + Δt·((1 + t)·v − x) + √(2·(1 − t)·Δt)·noise    N − 1 even steps to 0.96; one of
            0.04, no noise

The SDE's drift is v + w·score, with score = (t·v − x)/(1 − t) and SiT's diffusion w = 1 −
t, the noise level. A shift s moves even times t to s·t / (1 + (s − 1)·t): below one the
steps at noise are shorter. An ODE's even times may end before 1, as at 0.999 (Zheng et al. 2025,
arXiv:2510.11690).

A network may estimate the data x̂ in place of the velocity (Li & He 2025, arXiv:2511.13720):
then v = (x̂ − x) / max(1 − t, ε). Guidance is linear, so it may come before this.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from accel.families import IntervalRule
from accel.sampling.intervals import shifted, step_levels
from accel.sampling.process import Process, State

LAST_STEP = 0.04  # length of the SDE's last step, SiT's default


@dataclass(frozen=True)
class Euler(Process):
    """Solve the flow's ODE by Euler's method.

    shift: of the times; 1 keeps them even. t_eps: lower bound of the divisor 1 − t for networks
    that estimate the data; None: the network estimates the velocity. noise_scale: scale of the
    first noise. by_start: whether Heun's method guides both evaluations of a step by the noise
    level at its start, or each by its own level. last_time: the end of the even times; below 1
    some noise is left. interval_rule: rounding of `noise_levels` (accel/sampling/intervals.py).
    starts_at_one: whether the first noise level is exactly 1, so that every interval up to 1
    includes it, or as the shift rounds it, which may be above 1.
    """

    number: int  # of steps
    shift: float = 1.0
    t_eps: float | None = None
    noise_scale: float = 1.0
    by_start: bool = True
    last_time: float = 1.0
    interval_rule: IntervalRule = "float64 levels"
    starts_at_one: bool = True

    @property
    def draws(self) -> int:
        return 0

    def _ends(self) -> list[float]:
        """Return the times at the ends of all steps, N + 1 numbers."""
        even = [self.last_time * i / self.number for i in range(self.number + 1)]
        return [shifted(t, self.shift) for t in even]

    def times(self) -> list[float]:
        return self._ends()[:-1]

    def noise_levels(self) -> list[float]:
        levels = step_levels(self.interval_rule, self.number, self.last_time, self.shift)
        if self.starts_at_one:
            levels[0] = 1
        return levels[:-1].tolist()

    def lengths(self) -> list[float]:
        """Return the length of the step of every evaluation, in order."""
        return np.diff(self._ends()).tolist()

    def coefficients(self) -> list:
        """Return the length of the step of every evaluation, and the number that its estimate
        of the data is divided by, two lists.
        """
        least = self.t_eps or 1.0
        return [self.lengths(), [max(1 - t, least) for t in self.times()]]

    def begin(self, x) -> State:
        return (self.noise_scale * x,)

    def finished(self, x, t, out) -> Tensor:
        return x + (self._ends()[-1] - t) * out if self.t_eps is None else out

    def upload_tables(self, device) -> None:
        _upload(self, device)

    def _length(self, x, at):
        """Return the length of the step: a number, or (n, 1, 1, 1) of x's device."""
        if self.shift == 1:
            return self.last_time / self.number
        return _upload(self, x.device)[0, at, None, None, None]

    def _velocity(self, evaluate, x, at):
        """Evaluate the velocity at x (n, C, H, W). at (n,): the index of the evaluation."""
        out = evaluate(x)
        if self.t_eps is None:
            return out
        return (out - x) / _upload(self, x.device)[1, at, None, None, None]

    def step(self, state, at, noise, networks) -> State:
        (x,) = state
        (evaluate,) = networks
        return (x + self._length(x, at) * self._velocity(evaluate, x, at),)


class Heun(Euler):
    """The flow's ODE by Heun's method."""

    @property
    def evaluation_counts(self) -> list[int]:
        return [2] * (self.number - 1) + [1]

    def times(self) -> list[float]:
        """Return the times at both ends of every step but the last, and at that one's start."""
        return np.repeat(super().times(), 2)[1:].tolist()

    def noise_levels(self) -> list[float]:
        levels = np.repeat(super().noise_levels(), 2)
        return (levels[:-1] if self.by_start else levels[1:]).tolist()

    def lengths(self) -> list[float]:
        return np.repeat(super().lengths(), 2)[:-1].tolist()

    def step(self, state, at, noise, networks) -> State:
        if len(networks) == 1:  # the last step
            return super().step(state, at, noise, networks)
        (x,) = state
        at_start, at_end = networks
        length = self._length(x, at)
        v = self._velocity(at_start, x, at)
        at_next = self._velocity(at_end, x + length * v, at + 1)
        return (x + length / 2 * (v + at_next),)


class Sde(Euler):
    """The SDE with the same marginals by Euler and Maruyama's method. number: at least 2.
    Its times have no shift; its network estimates the velocity.
    """

    noise_from_cpu = True

    @property
    def draws(self) -> int:
        return self.number - 1

    def times(self) -> list[float]:
        return [i * (1 - LAST_STEP) / (self.number - 1) for i in range(self.number)]

    def noise_levels(self) -> list[float]:
        return torch.linspace(1, LAST_STEP, self.number, dtype=torch.float64).tolist()

    def coefficients(self) -> list:
        """Return the coefficients of x, v and the noise in the step of every evaluation,
        three lists.
        """
        *starts, last = self.times()
        step = (1 - LAST_STEP) / (self.number - 1)
        steps = [(1 - step, step * (1 + t), (2 * (1 - t) * step) ** 0.5) for t in starts]
        # its noise is that of the step before, times zero
        steps.append((1 - LAST_STEP, LAST_STEP * (1 + last), 0.0))
        return [list(column) for column in zip(*steps)]

    def step(self, state, at, noise, networks) -> State:
        (x,) = state
        (evaluate,) = networks
        of_x, of_v, of_noise = _upload(self, x.device)[:, at, None, None, None]  # each (n, 1, 1, 1)
        return (of_x * x + of_v * evaluate(x) + of_noise * noise,)


FLOWS = {"euler": Euler, "heun": Heun, "sde": Sde}


@lru_cache(maxsize=None)  # captured steps read them at fixed addresses
def _upload(process: Euler, device: torch.device) -> Tensor:
    """Upload the process's coefficients (…, evaluations), once a device."""
    with torch.inference_mode(False):  # later callers may be in another mode
        return torch.tensor(process.coefficients(), dtype=torch.float64).float().to(device)
