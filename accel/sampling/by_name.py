"""Make a process from the name of its sampler. Only that sampler's modules are imported."""

from typing import Any

from accel.errors import UsageError
from accel.families import Family
from accel.sampling.process import Process


def make_process(
    sampler: str,
    steps: int,
    *,
    shift: float = 1.0,
    eta: float = 0.0,
    learn_sigma: bool = True,
    **flow: Any,
) -> Process:
    """Return the process of a sampler in `steps` steps.

    shift: of a flow's times; eta: DDIM's noise; learn_sigma: whether the network estimates
    the variance too. flow: other fields of a flow's process.
    """
    if sampler in ("euler", "heun", "sde"):
        from accel.sampling.flow import FLOWS

        return FLOWS[sampler](steps, shift, **flow)
    if sampler in ("dpm++", "unipc"):
        from accel.sampling.solvers import Solver, make_scheduler

        return Solver(make_scheduler(sampler), steps)
    from accel.diffusion import create_diffusion
    from accel.sampling.ancestral import Ancestral, Ddim

    diffusion = create_diffusion(str(steps), learn_sigma=learn_sigma)
    return Ddim(diffusion, eta) if sampler == "ddim" else Ancestral(diffusion)


def by_scheduler(scheduler: Any, steps: int, family: Family) -> Process:
    """Return the process of a scheduler of diffusers. Raises UsageError for a flow: its
    estimates are not of noise.
    """
    if family.prediction != "noise":
        raise UsageError(
            "`sampler`: a scheduler takes estimates of noise, and this is a flow; give "
            f"{', '.join(family.samplers)}"
        )
    from accel.sampling.solvers import Solver

    return Solver(scheduler, steps)
