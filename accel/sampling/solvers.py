"""Samplers of diffusers: the library computes the steps, this repository evaluates the
network.

Other pictures than ancestral sampling's, in 10 to 25 evaluations: DPM-Solver++ (Lu et al.
2022, arXiv:2211.01095), UniPC (Zhao et al. 2023, arXiv:2302.04867), and any scheduler
that takes estimates of noise.
"""

import copy
import inspect
import logging
import sys
from collections.abc import Mapping
from importlib import import_module
from statistics import median
from typing import Any

import numpy as np
import torch

from accel.errors import UsageError, shown
from accel.sampling.process import ABAR, BETAS, Process, State

log = logging.getLogger(__name__)

# Name → module and class of diffusers.schedulers: importing the module alone takes a
# fraction of the time.
SOLVERS = {
    "dpm++": ("scheduling_dpmsolver_multistep", "DPMSolverMultistepScheduler"),
    "unipc": ("scheduling_unipc_multistep", "UniPCMultistepScheduler"),
}
CLIPPING = "clip_sample", "thresholding"  # options of schedulers
# Relative errors that a rehearsal allows. Times that are rounded to whole ones reach 0.1,
# schedulers of another process 0.4 and more.
REHEARSED = 0.2


def make_scheduler(name: str, **config: Any) -> Any:
    """Make the scheduler of a name in SOLVERS with DiT's betas. config: further
    arguments, such as solver_order.
    """
    module, class_name = SOLVERS[name]
    return getattr(_import(f"diffusers.schedulers.{module}"), class_name)(
        trained_betas=BETAS, **config
    )


# DiT's values of the entries that define the trained process in a scheduler's
# configuration.
TRAINED = {
    "prediction_type": "epsilon",
    "num_train_timesteps": 1000,
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "rescale_betas_zero_snr": False,
}


def require_schedule(owner: str, config: Mapping[str, Any] | None) -> None:
    """Raise UsageError about `owner`, naming the entry, if a scheduler's configuration is
    of another process than DiT's. trained_betas take precedence over the schedule's name.
    """
    config = config or {}
    wanted = dict(TRAINED)
    betas = config.get("trained_betas")
    if betas is not None:
        if np.shape(betas) != BETAS.shape or not np.allclose(betas, BETAS, rtol=1e-5):
            raise UsageError(f"{owner}: its scheduler's trained_betas are not DiT's linear ones")
        wanted = {name: wanted[name] for name in ("prediction_type", "rescale_betas_zero_snr")}
    for name, value in wanted.items():
        if config.get(name, value) != value:
            raise UsageError(
                f"{owner}: its scheduler has {name} {shown(config[name])}, and only {value} is "
                "sampled"
            )


def require_scheduler(scheduler: Any) -> None:
    """Raise UsageError unless `scheduler` is a scheduler of diffusers that takes
    estimates of noise, with DiT's betas.
    """
    if not (
        isinstance(getattr(scheduler, "config", None), Mapping)
        and callable(getattr(scheduler, "step", None))
    ):
        raise UsageError(
            f"`sampler={shown(scheduler)}`: give a sampler's name, or a scheduler of diffusers"
        )
    if "beta_schedule" not in scheduler.config and "trained_betas" not in scheduler.config:
        raise UsageError(
            f"`sampler`: {type(scheduler).__name__} has no betas: it is not for a network of "
            "noise estimates"
        )
    require_schedule("`sampler`", scheduler.config)
    kept = getattr(scheduler, "alphas_cumprod", None)
    if kept is not None and not np.allclose(kept, ABAR, rtol=1e-3):
        name = type(scheduler).__name__
        raise UsageError(f"`sampler`: the alphas_cumprod of {name} are not DiT's")


def _import(module):
    """Import a module of diffusers without torch's compiler, from which the library takes
    an optional decorator at more than half of its import time.
    """
    compiler = "torch._dynamo"
    if compiler in sys.modules:
        return import_module(module)
    sys.modules[compiler] = None  # importing it fails
    try:
        return import_module(module)
    finally:
        sys.modules.pop(compiler, None)


class _NoGenerator:
    """A stand-in for a generator: a scheduler that draws noise asks for its device."""

    def __init__(self, name: str):
        self.name = name

    @property
    def device(self) -> None:
        raise UsageError(
            f"`sampler`: {self.name} draws noise in its steps; give a deterministic scheduler"
        )


class Solver(Process):
    """Sampling by a deterministic scheduler of diffusers that takes estimates of noise.

    scheduler: it is copied, not changed. steps: its num_inference_steps. Raises UsageError,
    naming the scheduler, unless it samples DiT's process in this number of steps.
    """

    captured = False

    def __init__(self, scheduler: Any, steps: int):
        require_scheduler(scheduler)
        self.scheduler = copy.deepcopy(scheduler)
        self.name = type(scheduler).__name__
        takes_generator = "generator" in inspect.signature(scheduler.step).parameters
        self.generator = dict(generator=_NoGenerator(self.name)) if takes_generator else {}
        another = "give another scheduler or `num_sampling_steps`"
        try:
            self.scheduler.set_timesteps(steps)
            self._times = self.scheduler.timesteps.tolist()
            error = self._rehearse()
        except UsageError:
            raise
        except Exception as failure:  # in code that is not ours
            reason = f"{type(failure).__name__}: {failure}"[:120].splitlines()[0]
            raise UsageError(
                f"`sampler`: {self.name} fails in {steps} steps ({reason}); {another}"
            ) from None
        if not error <= REHEARSED:
            raise UsageError(
                f"`sampler`: {self.name} in {steps} steps and with this configuration samples "
                f"another process than DiT's; {another}"
            )
        _say_what_is_clipped(self.name, scheduler.config)

    def _rehearse(self):
        """Sample by a network that estimates noise without error. Return the relative error
        of the process: of the finished latents, or of the usual network input at its time.
        """
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(1, 4, 4, 4, generator=generator)
        latents = torch.rand(noise.shape, generator=generator) - 0.5  # some schedulers clip to 1
        errors = []
        state = self.begin(noise)
        for t in self._times:
            kept = float(np.interp(t, np.arange(len(ABAR)), ABAR))

            def evaluate(x, kept=kept):
                estimate = (x - kept**0.5 * latents) / (1 - kept) ** 0.5
                errors.append(_error(estimate, noise))  # none: x is latents and this noise
                return estimate

            state = self.step(state, None, None, [evaluate])
        # Of rounded times the last, with little noise, may be far off.
        return max(_error(state[0], latents), median(errors))

    @property
    def _values(self):
        return type(self.scheduler), str(self.scheduler.config), *self._times

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Solver) and self._values == other._values

    def __hash__(self) -> int:
        return hash(self._values)

    @property
    def evaluation_counts(self) -> list[int]:
        return [1] * len(self._times)

    @property
    def draws(self) -> int:
        return 0

    def times(self) -> list[float]:
        return self._times

    def begin(self, x) -> State:
        scheduler = copy.deepcopy(self.scheduler)
        return x * scheduler.init_noise_sigma, scheduler, iter(scheduler.timesteps)

    def step(self, state, at, noise, networks) -> State:
        x, scheduler, times = state
        (evaluate,) = networks
        t = next(times)
        # without the learned variance
        eps = evaluate(scheduler.scale_model_input(x, t))[:, : x.shape[1]]
        return scheduler.step(eps, t, x, return_dict=False, **self.generator)[0], scheduler, times


def _say_what_is_clipped(name, config):
    """Print the options by which a scheduler clips its estimates of the finished latents: they
    are for pixels. The rehearsal's own latents are too small to be clipped.
    """
    for option in CLIPPING:
        if config.get(option):
            log.warning(
                f"sampler: {name} has {option}=True, which clips latents; DiT's published "
                f"configuration has {option}=False"
            )


def _error(got, want):
    """Return a relative error; infinity for values that are not finite."""
    error = float((got - want).norm() / want.norm())
    return error if error < float("inf") else float("inf")
