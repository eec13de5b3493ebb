"""Sampling with fewer steps than the process was trained with: Nichol & Dhariwal 2021
(2102.09672), section 4.
"""

import functools
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from .gaussian_diffusion import GaussianDiffusion


def space_timesteps(num_timesteps: int, section_counts: str | list[int]) -> set[int]:
    """Return the timesteps to keep of `num_timesteps`.

    section_counts: a list of numbers, or a string of numbers with commas. The process is divided
    into that many equal sections, and each keeps its number of evenly spaced steps: "10,15,20" of
    300 keeps ten of the first hundred, fifteen of the second and twenty of the third. "ddimN": N
    steps at an integer stride from 0 (Song et al. 2021).

    Raises ValueError for any other value, for a section shorter than its count, and for a stride
    that does not exist.
    """
    if isinstance(section_counts, str) and section_counts.startswith("ddim"):
        wanted = _counts([section_counts[len("ddim") :]], section_counts)[0]
        for stride in range(1, num_timesteps + 1):
            regular = range(0, num_timesteps, stride)
            if len(regular) == wanted:
                return set(regular)
        raise ValueError(
            f'timestep respacing "{section_counts}": no integer stride gives {wanted} of '
            f'{num_timesteps} steps; take "{wanted}" for an uneven one'
        )

    counts = section_counts.split(",") if isinstance(section_counts, str) else section_counts
    counts = _counts(counts, section_counts)
    kept: list[int] = []
    start = 0
    for section, count in enumerate(counts):
        size = num_timesteps // len(counts) + (section < num_timesteps % len(counts))
        if count > size:
            raise ValueError(
                f'timestep respacing "{section_counts}": {count} steps of a section of {size} '
                f"(the process has {num_timesteps} steps, in {len(counts)} section(s))"
            )
        stride = (size - 1) / (count - 1) if count > 1 else 1
        position = 0.0
        for _ in range(count):
            # A running sum, as in upstream: multiplication rounds some halves differently.
            kept.append(start + round(position))
            position += stride
        start += size
    return set(kept)


def _counts(values, given):
    """Return `values` as counts of steps, of which at least one is positive. given: the user's
    value, for the error.
    """
    try:
        counts = [int(value) for value in values]
    except (TypeError, ValueError):
        counts = []
    if not counts or min(counts) < 0 or sum(counts) == 0:
        raise ValueError(
            f'timestep respacing "{given}": expected a number of steps ("250"), one per section '
            '("10,15,20") or an even stride ("ddim50"), with at least one step in all'
        )
    return counts


class SpacedDiffusion(GaussianDiffusion):
    """The process restricted to `use_timesteps`, with the same marginals and new betas:

        beta'_i = 1 - abar_{S_i} / abar_{S_{i-1}}    (Nichol & Dhariwal 2021, section 4)

    Its own timesteps are 0 ... num_timesteps - 1; the model and cond_fn receive the
    original timesteps. use_timesteps: the original timesteps to keep. Other arguments: as
    GaussianDiffusion's, with the original betas. Attributes: use_timesteps (set),
    timestep_map (sorted list: own index to original timestep), original_num_steps. Raises
    ValueError if use_timesteps is empty or reaches outside the process.
    """

    def __init__(self, use_timesteps: Iterable[int], **kwargs):
        self.use_timesteps = set(use_timesteps)
        self.timestep_map = sorted(self.use_timesteps)
        base = GaussianDiffusion(**kwargs)
        self.original_num_steps = base.num_timesteps
        if (
            not self.timestep_map
            or self.timestep_map[0] < 0
            or self.timestep_map[-1] >= base.num_timesteps
        ):
            raise ValueError(
                f"use_timesteps: expected some of 0 ... {base.num_timesteps - 1}, got "
                f"{self.timestep_map[:1]} ... {self.timestep_map[-1:]}"
            )
        kept = base.alphas_cumprod[self.timestep_map]
        kwargs["betas"] = 1.0 - kept / np.append(1.0, kept[:-1])
        super().__init__(**kwargs)

    def _upload(self, device):
        timestep_map = torch.tensor(self.timestep_map, dtype=torch.int64, device=device)
        return {**super()._upload(device), "timestep_map": timestep_map}

    def original_timesteps(self, t: Tensor) -> Tensor:
        """Return the original timesteps (N,) int64 of this process's t (N,), looked up on
        t's device.
        """
        return self._tables(t.device)["timestep_map"][t.long()]

    def _wrap_model(self, model):
        """Return `model` or a cond_fn as a function of this process's t."""
        if isinstance(model, _WrappedModel):
            return model
        wrapped = _WrappedModel(model, self.timestep_map, self.original_num_steps)
        wrapped.original_timesteps = self.original_timesteps  # reads the table on the device
        return wrapped

    # Model and cond_fn of these methods receive the original timesteps.

    @functools.wraps(GaussianDiffusion.p_mean_variance)
    def p_mean_variance(self, model, *args, **kwargs) -> dict[str, Tensor]:
        return super().p_mean_variance(self._wrap_model(model), *args, **kwargs)

    @functools.wraps(GaussianDiffusion.training_losses)
    def training_losses(self, model, *args, **kwargs) -> dict[str, Tensor]:
        return super().training_losses(self._wrap_model(model), *args, **kwargs)

    @functools.wraps(GaussianDiffusion.condition_mean)
    def condition_mean(self, cond_fn, *args, **kwargs) -> Tensor:
        return super().condition_mean(self._wrap_model(cond_fn), *args, **kwargs)

    @functools.wraps(GaussianDiffusion.condition_score)
    def condition_score(self, cond_fn, *args, **kwargs) -> dict[str, Tensor]:
        return super().condition_score(self._wrap_model(cond_fn), *args, **kwargs)


class _WrappedModel:
    """A model or cond_fn that takes a respaced process's t, its index into timestep_map."""

    def __init__(self, model, timestep_map, original_num_steps):
        self.model = model
        self.timestep_map = timestep_map
        self.original_num_steps = original_num_steps

    def original_timesteps(self, ts):
        """Return the original timesteps (N,) of ts (N,). It copies the map to ts's device."""
        return torch.tensor(self.timestep_map, device=ts.device)[ts.long()]

    def __call__(self, x, ts, **kwargs):
        return self.model(x, self.original_timesteps(ts), **kwargs)
