"""DPM-Solver++ (Lu et al. 2022, arXiv:2211.01095) and UniPC (Zhao et al. 2023, arXiv:2302.04867).

They need 10 to 25 evaluations and make other pictures than ancestral sampling. diffusers computes
the steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from accel.errors import InputRef, shown
from accel.sampling.process import BETAS, Process, State

# Name → module and class of diffusers.schedulers. Importing only the module is much faster than
# importing the package.
SOLVERS = {
    "dpm++": ("scheduling_dpmsolver_multistep", "DPMSolverMultistepScheduler"),
    "unipc": ("scheduling_unipc_multistep", "UniPCMultistepScheduler"),
}
# The entries of a scheduler's configuration that define DiT's training process.
TRAINED = {
    "prediction_type": "epsilon",
    "num_train_timesteps": 1000,
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "rescale_betas_zero_snr": False,
}


def require_schedule(given: InputRef, config: Mapping[str, Any]) -> None:
    """Raise UsageError, which names the entry, if a scheduler's configuration differs from DiT's
    training process. trained_betas take precedence over the schedule's name.
    """
    kind = str(config.get("_class_name"))
    if "Flow" in kind:
        raise given.error(
            f"its scheduler is a {shown(kind)}, of a flow, and only noise prediction is supported"
        )
    wanted = dict(TRAINED)
    betas = config.get("trained_betas")
    if betas is not None:
        if np.shape(betas) != BETAS.shape or not np.allclose(betas, BETAS, rtol=1e-5):
            raise given.error("its scheduler's trained_betas are not DiT's linear ones")
        wanted = {name: wanted[name] for name in ("prediction_type", "rescale_betas_zero_snr")}
    for name, value in wanted.items():
        if config.get(name, value) != value:
            raise given.error(
                f"its scheduler has {name} {shown(config[name])}, and only {value} is supported"
            )


@dataclass(frozen=True)
class Solver(Process):
    """Sample by a deterministic solver of diffusers, with DiT's betas. name: in SOLVERS."""

    captured = False

    name: str
    steps: int

    @property
    def noise_draws(self) -> int:
        return 0

    def _scheduler(self):
        """Return a new scheduler of diffusers."""
        module, class_name = SOLVERS[self.name]
        schedulers = import_module(f"diffusers.schedulers.{module}")
        scheduler = getattr(schedulers, class_name)(trained_betas=BETAS)
        scheduler.set_timesteps(self.steps)
        return scheduler

    def times(self) -> list[float]:
        return self._scheduler().timesteps.tolist()

    def begin(self, x) -> State:
        scheduler = self._scheduler()
        return x * scheduler.init_noise_sigma, scheduler, iter(scheduler.timesteps)

    def step(self, state, index, noise, networks) -> State:
        x, scheduler, times = state
        (evaluate,) = networks
        t = next(times)
        # The solvers do not use the learned variance.
        eps = evaluate(scheduler.scale_model_input(x, t))[:, : x.shape[1]]
        return scheduler.step(eps, t, x, return_dict=False)[0], scheduler, times
