"""Samplers of DiT's process with one network evaluation per step.

The network estimates the noise ε in x_t = √ᾱ_t·x_0 + √(1 − ᾱ_t)·ε, so

    x_0 = (x_t − √(1 − ᾱ_t)·ε) / √ᾱ_t

The equations and the order of operations are diffusion/'s, so results have the same bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from accel.sampling.process import ABAR, Process, State


@lru_cache(maxsize=None)
def spaced_timesteps(steps: int) -> list[int]:
    """Return `steps` evenly spaced ones of the trained timesteps, ascending."""
    stride = (len(ABAR) - 1) / (steps - 1) if steps > 1 else 1
    timesteps = []
    position = 0.0
    for _ in range(steps):
        # A running sum, as in the original: multiplication rounds some halves differently.
        timesteps.append(round(position))
        position += stride
    return timesteps


@lru_cache(maxsize=None)  # captured steps read the tables at fixed addresses
def _tables(steps: int, device: torch.device) -> Mapping[str, Tensor]:
    """Return the steps' coefficients by name, float32 (steps,) on `device`."""
    trained = ABAR[spaced_timesteps(steps)]
    betas = 1 - trained / np.append(1.0, trained[:-1])  # Nichol & Dhariwal 2021, section 4
    abar = np.cumprod(1 - betas)
    abar_prev = np.append(1.0, abar[:-1])
    # Of q(x_{t-1} | x_t, x_0), Ho eq. 7. At t = 0 it is 0, so its log takes the value of t = 1.
    variance = betas * (1 - abar_prev) / (1 - abar)
    first = variance[1] if steps > 1 else betas[0]
    tables = {
        "abar": abar,
        "abar_prev": abar_prev,
        "start_x": np.sqrt(1 / abar),
        "start_eps": np.sqrt(1 / abar - 1),
        "mean_start": betas * np.sqrt(abar_prev) / (1 - abar),
        "mean_x": (1 - abar_prev) * np.sqrt(1 - betas) / (1 - abar),
        "min_log_variance": np.log(np.append(first, variance[1:])),
        "max_log_variance": np.log(betas),
        "fixed_log_variance": np.log(np.append(first, betas[1:])),
    }
    with torch.inference_mode(False):  # later callers may be in another mode
        rows = torch.from_numpy(np.stack(list(tables.values()))).float().to(device)
    return dict(zip(tables, rows.unbind(0)))


@dataclass(frozen=True)
class Ancestral(Process):
    """Ancestral sampling (Ho et al. 2020, arXiv:2006.11239, algorithm 2).

    learn_sigma: whether the output's second half of channels is the learned variance.
    """

    steps: int
    learn_sigma: bool = True

    def times(self) -> list[int]:
        return spaced_timesteps(self.steps)[::-1]

    def _coefficient(self, name, index, x):
        """Return a coefficient (n, 1, 1, 1) of the steps `index` (n,), on x's device."""
        t = self.steps - 1 - index
        return _tables(self.steps, x.device)[name][t, None, None, None]

    def _predict_start(self, x, eps, index):
        """Predict x_0 (n, C, H, W)."""
        scaled = self._coefficient("start_x", index, x) * x
        return (scaled - self._coefficient("start_eps", index, x) * eps).contiguous()

    def step(self, state, index, noise, networks) -> State:
        """Return x_{t-1} = mean(x_t, x_0) + [t ≠ 0]·σ·noise."""
        (x,) = state
        (evaluate,) = networks
        out = evaluate(x)
        start = self._predict_start(x, out[:, : x.shape[1]], index)
        mean = self._coefficient("mean_start", index, x) * start
        mean = mean + self._coefficient("mean_x", index, x) * x
        log_variance = self._coefficient("fixed_log_variance", index, x)
        if self.learn_sigma:  # Nichol & Dhariwal 2021, eq. 15
            fraction = (out[:, x.shape[1] :] + 1) / 2
            max_log = self._coefficient("max_log_variance", index, x)
            min_log = self._coefficient("min_log_variance", index, x)
            log_variance = fraction * max_log + (1 - fraction) * min_log
        not_last = (index != self.steps - 1).float()[:, None, None, None]
        sigma = torch.exp(0.5 * log_variance)
        return (mean.contiguous() + not_last * sigma * noise,)


@dataclass(frozen=True)
class Ddim(Ancestral):
    """DDIM (Song et al. 2021, arXiv:2010.02502, eq. 12 and 16).

    eta: scale of the noise, from 0 (none) to 1 (ancestral).
    """

    eta: float = 0.0

    def step(self, state, index, noise, networks) -> State:
        """Return x_{t-1} = √ᾱ'·x_0 + √(1 − ᾱ' − σ²)·ε + σ·noise, ᾱ' = ᾱ_{t-1}."""
        (x,) = state
        (evaluate,) = networks
        start = self._predict_start(x, evaluate(x)[:, : x.shape[1]], index)
        eps = (self._coefficient("start_x", index, x) * x - start) / self._coefficient(
            "start_eps", index, x
        )
        abar = self._coefficient("abar", index, x)
        abar_prev = self._coefficient("abar_prev", index, x)
        sigma = (
            self.eta * torch.sqrt((1 - abar_prev) / (1 - abar)) * torch.sqrt(1 - abar / abar_prev)
        )
        # Rounding may make it negative if η is 1.
        variance = (1 - abar_prev - sigma**2).clamp(min=0)
        mean = start * torch.sqrt(abar_prev) + torch.sqrt(variance) * eps
        return (mean + sigma * noise,)
