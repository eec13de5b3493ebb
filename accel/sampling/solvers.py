"""Samplers of diffusers: the library computes the steps, this repository evaluates the
network.

Other pictures than ancestral sampling's, in 10 to 25 evaluations: DPM-Solver++ (Lu et al.
2022, arXiv:2211.01095), UniPC (Zhao et al. 2023, arXiv:2302.04867), and any scheduler
that takes estimates of noise.
"""

import inspect
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np

from accel.diffusion.gaussian_diffusion import get_named_beta_schedule
from accel.diffusion.respace import ByValue
from accel.errors import UsageError, shown
from accel.sampling.process import Process, State

# Name → module and class of diffusers.schedulers: importing the module alone takes a
# fraction of the time.
SOLVERS = {
    "dpm++": ("scheduling_dpmsolver_multistep", "DPMSolverMultistepScheduler"),
    "unipc": ("scheduling_unipc_multistep", "UniPCMultistepScheduler"),
}
LINEAR = get_named_beta_schedule("linear", 1000)


def make_scheduler(name: str, **config: Any) -> Any:
    """Make the scheduler of a name in SOLVERS with DiT's betas. config: further
    arguments, such as solver_order.
    """
    module, kind = SOLVERS[name]
    return getattr(_import(f"diffusers.schedulers.{module}"), kind)(trained_betas=LINEAR, **config)


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
        if np.shape(betas) != LINEAR.shape or not np.allclose(betas, LINEAR, rtol=1e-5):
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
    estimates of noise.
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

    @property
    def device(self) -> None:
        raise UsageError(
            "`sampler`: this scheduler draws noise in its steps; give a deterministic one"
        )


class Solver(ByValue, Process):
    """Sampling by a deterministic scheduler of diffusers that takes estimates of noise.

    scheduler: it is copied, not changed. steps: its num_inference_steps.
    """

    draws = 0
    captured = False

    def __init__(self, scheduler: Any, steps: int):
        require_scheduler(scheduler)
        require_schedule("`sampler`", scheduler.config)
        self.scheduler = scheduler
        self.number = steps
        takes_generator = "generator" in inspect.signature(scheduler.step).parameters
        self.generator = dict(generator=_NoGenerator()) if takes_generator else {}
        self._times = self._begun().timesteps.tolist()

    @property
    def _values(self):
        return type(self.scheduler), str(self.scheduler.config), *self._times

    def _begun(self):
        """Return a copy of the scheduler, at its first step."""
        scheduler = type(self.scheduler).from_config(self.scheduler.config)
        scheduler.set_timesteps(self.number)
        return scheduler

    @property
    def evaluation_counts(self) -> list[int]:
        return [1] * len(self._times)

    def times(self) -> list[float]:
        return self._times

    def begin(self, x) -> State:
        scheduler = self._begun()
        return x * scheduler.init_noise_sigma, scheduler, iter(scheduler.timesteps)

    def step(self, state, at, noise, networks) -> State:
        x, scheduler, times = state
        (evaluate,) = networks
        t = next(times)
        # without the learned variance
        eps = evaluate(scheduler.scale_model_input(x, t))[:, : x.shape[1]]
        return scheduler.step(eps, t, x, return_dict=False, **self.generator)[0], scheduler, times
