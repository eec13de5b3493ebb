"""Samplers of DiT's process with one network evaluation per step.

The network estimates the noise ε in x_t = √ᾱ_t·x_0 + √(1 − ᾱ_t)·ε, so

    x_0 = (x_t − √(1 − ᾱ_t)·ε) / √ᾱ_t

Equations and order of operations are those of diffusion/, upstream's package: the same bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from accel.sampling.process import ABAR, Process, State


@lru_cache(maxsize=None)
def kept_timesteps(steps: int) -> list[int]:
    """Return the trained timesteps that `steps` evenly spaced steps keep, ascending."""
    stride = (len(ABAR) - 1) / (steps - 1) if steps > 1 else 1
    kept = []
    position = 0.0
    for _ in range(steps):
        # Add up as published results did: multiplication rounds some halves to another timestep.
        kept.append(round(position))
        position += stride
    return kept


@lru_cache(maxsize=None)  # captured steps read them at fixed addresses
def _tables(steps: int, device: torch.device) -> Mapping[str, Tensor]:
    """Return the coefficients of `steps` steps by name, float32 (steps,) on `device`."""
    kept = ABAR[kept_timesteps(steps)]
    betas = 1 - kept / np.append(1.0, kept[:-1])  # Nichol & Dhariwal 2021, section 4
    abar = np.cumprod(1 - betas)
    before = np.append(1.0, abar[:-1])
    # Of q(x_{t-1} | x_t, x_0), Ho eq. 7. It is 0 at t = 0, where that of t = 1 is taken.
    variance = betas * (1 - before) / (1 - abar)
    first = variance[1] if steps > 1 else betas[0]
    tables = {
        "abar": abar,
        "abar_before": before,
        "of_x": np.sqrt(1 / abar),
        "of_noise": np.sqrt(1 / abar - 1),
        "mean_of_start": betas * np.sqrt(before) / (1 - abar),
        "mean_of_x": (1 - before) * np.sqrt(1 - betas) / (1 - abar),
        "least_log_variance": np.log(np.append(first, variance[1:])),
        "most_log_variance": np.log(betas),
        "fixed_log_variance": np.log(np.append(first, betas[1:])),
    }
    with torch.inference_mode(False):  # later callers may be in another mode
        rows = torch.from_numpy(np.stack(list(tables.values()))).float().to(device)
    return dict(zip(tables, rows.unbind(0)))


@dataclass(frozen=True)
class Ancestral(Process):
    """Ancestral sampling (Ho et al. 2020, arXiv:2006.11239, algorithm 2).

    learn_sigma: whether the network estimates the variance too, in further channels.
    """

    number: int  # of steps
    learn_sigma: bool = True

    def times(self) -> list[int]:
        return kept_timesteps(self.number)[::-1]

    def upload_tables(self, device) -> None:
        _tables(self.number, device)

    def _at(self, name, at, x):
        """Return a coefficient of the step of evaluation `at` (n,), (n, 1, 1, 1)."""
        t = self.number - 1 - at
        return _tables(self.number, x.device)[name][t, None, None, None]

    def _start(self, x, eps, at):
        """Return the estimate of x_0 (n, C, H, W)."""
        scaled = self._at("of_x", at, x) * x
        return (scaled - self._at("of_noise", at, x) * eps).contiguous()

    def _log_variance(self, out, x, at):
        """Return the log of the step's variance: Nichol & Dhariwal 2021, eq. 15, if learned."""
        if not self.learn_sigma:
            return self._at("fixed_log_variance", at, x)
        fraction = (out[:, x.shape[1] :] + 1) / 2
        most = self._at("most_log_variance", at, x)
        return fraction * most + (1 - fraction) * self._at("least_log_variance", at, x)

    def step(self, state, at, noise, networks) -> State:
        """Return x_{t-1} = mean(x_t, x_0) + [t ≠ 0]·σ·noise."""
        (x,) = state
        (evaluate,) = networks
        out = evaluate(x)
        start = self._start(x, out[:, : x.shape[1]], at)
        mean = self._at("mean_of_start", at, x) * start + self._at("mean_of_x", at, x) * x
        not_last = (at != self.number - 1).float()[:, None, None, None]
        sigma = torch.exp(0.5 * self._log_variance(out, x, at))
        return (mean.contiguous() + not_last * sigma * noise,)


@dataclass(frozen=True)
class Ddim(Ancestral):
    """DDIM (Song et al. 2021, arXiv:2010.02502, eq. 12 and 16). eta: the noise of a step, from
    0 (none) to 1 (as in ancestral).
    """

    eta: float = 0.0

    def step(self, state, at, noise, networks) -> State:
        """Return x_{t-1} = √ᾱ'·x_0 + √(1 − ᾱ' − σ²)·ε + σ·noise, ᾱ' = ᾱ_{t-1}."""
        (x,) = state
        (evaluate,) = networks
        start = self._start(x, evaluate(x)[:, : x.shape[1]], at)
        eps = (self._at("of_x", at, x) * x - start) / self._at("of_noise", at, x)
        abar = self._at("abar", at, x)
        before = self._at("abar_before", at, x)
        sigma = self.eta * torch.sqrt((1 - before) / (1 - abar)) * torch.sqrt(1 - abar / before)
        # With η = 1 rounding may make it negative.
        variance = (1 - before - sigma**2).clamp(min=0)
        mean = start * torch.sqrt(before) + torch.sqrt(variance) * eps
        return (mean + sigma * noise,)
