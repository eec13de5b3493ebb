"""Distributions of training timesteps: uniform, or by the loss."""

from abc import ABC, abstractmethod

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


def create_named_schedule_sampler(name: str, diffusion) -> "ScheduleSampler":
    """Make a sampler of the timesteps of `diffusion`. name: "uniform" or
    "loss-second-moment", else ValueError.
    """
    if name == "uniform":
        return UniformSampler(diffusion)
    if name == "loss-second-moment":
        return LossSecondMomentResampler(diffusion)
    raise ValueError(f'schedule sampler "{name}": expected "uniform" or "loss-second-moment"')


class ScheduleSampler(ABC):
    """A distribution over timesteps, with importance weights that keep the expected loss
    unchanged.
    """

    @abstractmethod
    def weights(self) -> np.ndarray:
        """Return positive weights (num_timesteps,), not necessarily normalised."""

    def sample(self, batch_size: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Draw timesteps t (batch_size,) int64 with P(t) = p_t from numpy's global
        generator. Return t and importance weights 1 / (num_timesteps p_t), (batch_size,)
        float32.
        """
        p = self.weights()
        p = p / np.sum(p)
        t = np.random.choice(len(p), size=(batch_size,), p=p)
        weights = 1.0 / (len(p) * p[t])
        return (torch.from_numpy(t).long().to(device), torch.from_numpy(weights).float().to(device))


class UniformSampler(ScheduleSampler):
    """Every timestep with the same probability."""

    def __init__(self, diffusion):
        self.diffusion = diffusion
        self._weights = np.ones([diffusion.num_timesteps])

    def weights(self) -> np.ndarray:
        return self._weights


class LossAwareSampler(ScheduleSampler):
    """A sampler whose weights depend on the losses. All ranks of a process group receive all
    losses in the same order.
    """

    def update_with_local_losses(self, local_ts: Tensor, local_losses: Tensor) -> None:
        """Update from the timesteps local_ts (N,) and losses local_losses (N,) of every
        rank's batch; N may differ between ranks. This is a collective call if a process
        group is initialised.
        """
        batches = [(local_ts.tolist(), local_losses.tolist())]
        if dist.is_available() and dist.is_initialized():
            batches = batches * dist.get_world_size()
            dist.all_gather_object(batches, batches[0])
        ts: list[int] = []
        losses: list[float] = []
        for ts_of_rank, losses_of_rank in batches:
            ts += ts_of_rank
            losses += losses_of_rank
        self.update_with_all_losses(ts, losses)

    @abstractmethod
    def update_with_all_losses(self, ts: list[int], losses: list[float]) -> None:
        """Update from timesteps ts and their losses. Must be deterministic, so that ranks
        keep equal weights.
        """


class LossSecondMomentResampler(LossAwareSampler):
    """p_t proportional to sqrt(E[L_t^2]) over the last `history_per_term` losses of each
    t, mixed with a share `uniform_prob` of the uniform distribution (Nichol & Dhariwal
    2021, eq. 18). Uniform until every t has `history_per_term` losses.
    """

    def __init__(self, diffusion, history_per_term: int = 10, uniform_prob: float = 0.001):
        self.diffusion = diffusion
        self.history_per_term = history_per_term
        self.uniform_prob = uniform_prob
        self._loss_history = np.zeros([diffusion.num_timesteps, history_per_term], dtype=np.float64)
        self._loss_counts = np.zeros([diffusion.num_timesteps], dtype=np.int64)

    def weights(self) -> np.ndarray:
        if not self._warmed_up():
            return np.ones([self.diffusion.num_timesteps], dtype=np.float64)
        p = np.sqrt(np.mean(self._loss_history**2, axis=-1))
        p = p / np.sum(p)
        return p * (1.0 - self.uniform_prob) + self.uniform_prob / len(p)

    def update_with_all_losses(self, ts: list[int], losses: list[float]) -> None:
        for t, loss in zip(ts, losses):
            # Oldest first; the row is read as a whole only once every row is full.
            if self._loss_counts[t] == self.history_per_term:
                self._loss_history[t, :-1] = self._loss_history[t, 1:]
                self._loss_history[t, -1] = loss
            else:
                self._loss_history[t, self._loss_counts[t]] = loss
                self._loss_counts[t] += 1

    def _warmed_up(self):
        return bool((self._loss_counts == self.history_per_term).all())
