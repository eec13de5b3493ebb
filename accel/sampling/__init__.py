"""The denoising loop: noise → latents.

It depends only on the interfaces of a network, a process (accel/sampling/process.py) and a guidance
(accel/sampling/guidance.py).

The random stream is upstream's: z of n latents, then one normal draw at each of the first
`Process.noise_draws` steps. DiT's processes draw at every step, also at the last one and with
DDIM's η = 0. A draw has `Guidance.noise_rows` rows per latent. Only the first n rows are used,
because all batch rows of a latent share its noise.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from accel.runtime.network import Network
from accel.sampling.guidance import Guidance, Unguided
from accel.sampling.process import Process

OnStep = Callable[[int, torch.Tensor], None]


def make_process(
    sampler: str,
    steps: int,
    *,
    shift: float = 1.0,
    eta: float = 0.0,
    learn_sigma: bool = True,
    **flow: Any,
) -> Process:
    """Return the process of a sampler. Only the modules that it needs are imported.

    shift: of a flow's times. eta: scale of DDIM's noise. learn_sigma: whether the network estimates
    the variance too. flow: further fields of a flow's process.
    """
    if sampler in ("euler", "heun", "sde"):
        from accel.sampling.flow import FLOWS

        return FLOWS[sampler](steps, shift, **flow)
    if sampler in ("dpm++", "unipc"):
        from accel.sampling.solvers import Solver

        return Solver(sampler, steps)
    from accel.sampling.ancestral import Ancestral, Ddim

    if sampler == "ddim":
        return Ddim(steps, learn_sigma, eta)
    return Ancestral(steps, learn_sigma)


class Step(NamedTuple):
    """A step of a run."""

    number: int  # in the run, from 0
    evaluation: int  # index of its first evaluation
    guidances: tuple[Guidance | Unguided, ...]  # one per evaluation


def steps_of(process: Process, guidance: Guidance | Unguided) -> list[Step]:
    """Return the steps of a run, in order."""
    guidances = [guidance.at(level) for level in process.noise_levels()]
    steps = []
    evaluation = 0
    for number, count in enumerate(process.evaluation_counts):
        step_guidances = tuple(guidances[evaluation : evaluation + count])
        steps.append(Step(number, evaluation, step_guidances))
        evaluation += count
    return steps


def count_by_rows(process: Process, guidance: Guidance | Unguided) -> Counter[int]:
    """Count a run's evaluations by the number of rows per latent that a network evaluates."""
    return Counter(guidance.at(level).network_rows for level in process.noise_levels())


def upstream_noise(
    z: torch.Tensor,
    noise_rows: int,
    rows: slice = slice(None),
    generator: torch.Generator | None = None,
) -> Callable[[], torch.Tensor]:
    """Return a function that draws a step's noise (n', C, L, L) for `rows` of the batch z
    (n, C, L, L).

    noise_rows: rows of noise that a step draws per latent; only one is used. generator: by default
    torch's default generator on z's device. The numbers of a CPU generator are pinned and copied to
    z's device asynchronously.
    """
    shape = (noise_rows * len(z), *z.shape[1:])
    device = z.device if generator is None else generator.device
    pinned = z.is_cuda and device.type == "cpu"

    def draw():
        # As upstream does, draw all rows and use some.
        noise = torch.randn(shape, generator=generator, device=device, pin_memory=pinned)
        return noise[: len(z)][rows].to(z.device, non_blocking=True)

    return draw


@torch.inference_mode()
def denoise(
    network: Network,
    process: Process,
    guidance: Guidance | Unguided,
    z: torch.Tensor,
    labels: torch.Tensor,
    draw: Callable[[], torch.Tensor],
    *,
    steps: list[Step] | None = None,
    on_step: OnStep | None = None,
) -> torch.Tensor:
    """Sample latents (n, C, L, L) from noise z (n, C, L, L) and labels (n,) on the same device.

    draw: returns the noise of a step, like z. steps: some of `steps_of`, for warm-up; default: all.
    on_step(i, x): called after step i was queued, with its result x (n, C, L, L).
    """
    y = guidance.labels(labels)
    times = list(process.times())
    indices = torch.arange(len(times), device=z.device)
    run = network.prepare(times, y.tolist(), at_once=max(process.evaluation_counts))
    evaluate: Callable[..., torch.Tensor] = partial(network.forward, run=run)
    captures = network.captures and z.is_cuda
    scale: float | torch.Tensor = guidance.scale
    if captures:
        # A tensor, so that one captured step serves every scale.
        scale = torch.full((), guidance.scale, dtype=torch.float32, device=z.device)
    if captures and not process.captured:
        evaluate = network.graphed(run, evaluate)

    def make_step(rules, scale, index, y, noise, *state):
        networks = []
        for i, rule in enumerate(rules):
            at = index + i if i else index
            networks.append(partial(_evaluate_guided, evaluate, rule, scale, at, y))
        return process.step(state, index, noise, networks)

    if captures and process.captured:
        make_step = network.graphed((process, run), make_step)

    state = process.begin(z)
    noise = z[:0]
    for number, evaluation, guidances in steps or steps_of(process, guidance):
        run.advance(*range(evaluation, evaluation + len(guidances)))
        if number < process.noise_draws:
            noise = draw()
        index = indices[evaluation].expand(len(z))
        rules = tuple(each.rule() for each in guidances)
        state = make_step(rules, scale, index, y, noise, *state)
        if on_step is not None:
            on_step(number, state[0])
    return state[0]


def _evaluate_guided(evaluate, rule, scale, index, y, x):
    """Evaluate the network with guidance at x (n, C, H, W) → (n, C', H, W) in x's dtype.

    index (n,): of the evaluation. y: the labels of all batch rows.
    """
    out = evaluate(x, index.repeat(rule.copies), y[: rule.copies * len(x)])
    return rule.combine(out, scale)
