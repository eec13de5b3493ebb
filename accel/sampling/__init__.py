"""The denoising loop: noise → latents.

It depends on three interfaces only: a network, a process (accel/sampling/process.py) and
a guidance.

The random stream is upstream's: z of n latents, then one normal draw at every step of
`Process.draws`, of DiT's processes also at the last and with DDIM's η = 0. A draw has
`Guidance.drawn` rows a latent. Only the first n rows are used: all batch rows of a latent
share it.
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
    """Return the process of a sampler in `steps` steps; only its modules are imported.

    shift: of a flow's times; eta: DDIM's noise; learn_sigma: whether the network estimates
    the variance too. flow: other fields of a flow's process.
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

    number: int  # of the run's steps, from 0
    evaluation: int  # index of its first evaluation
    guidances: tuple[Guidance | Unguided, ...]  # one per evaluation


def steps_of(process: Process, guidance: Guidance | Unguided) -> list[Step]:
    """Return the steps of a run, in order."""
    guidances = [guidance.at(level) for level in process.noise_levels()]
    steps = []
    evaluation = 0
    for number, count in enumerate(process.evaluation_counts):
        of_step = tuple(guidances[evaluation : evaluation + count])
        steps.append(Step(number, evaluation, of_step))
        evaluation += count
    return steps


def count_by_rows(process: Process, guidance: Guidance | Unguided) -> Counter[int]:
    """Count the evaluations of a run by a network's batch rows per latent."""
    return Counter(guidance.at(level).rows for level in process.noise_levels())


def initial_noise(
    n: int, channels: int, latent_size: int, generator: torch.Generator
) -> torch.Tensor:
    """Draw the first normal of a run, z (n, C, L, L), on the generator's device."""
    return torch.randn(
        n, channels, latent_size, latent_size, generator=generator, device=generator.device
    )


def upstream_noise(
    z: torch.Tensor,
    drawn: int,
    rows: slice = slice(None),
    generator: torch.Generator | None = None,
) -> Callable[[], torch.Tensor]:
    """Return a function that draws a step's noise (n', C, L, L) for `rows` of the batch z
    (n, C, L, L).

    drawn: rows of noise that a step draws for a latent; one is used. generator: by default
    torch's own on z's device. A CPU generator draws on the CPU; its numbers are pinned and copied
    to z's device without waiting.
    """
    shape = (drawn * len(z), *z.shape[1:])
    device = z.device if generator is None else generator.device
    pinned = z.is_cuda and device.type == "cpu"

    def draw():
        # Draw `drawn`·n rows, use n': upstream's random stream.
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
    """Sample latents (n, C, L, L) from noise z (n, C, L, L) and labels (n,) on its
    device.

    draw: returns the noise of a step, like z. steps: some of `steps_of`, for warm-up;
    default: all. on_step(i, x): called when step i has been queued, with its result x (n,
    C, L, L).
    """
    y = guidance.labels(labels)
    indices = torch.arange(process.evaluations, device=z.device)
    at_once = max(process.evaluation_counts)
    run = network.prepare(list(process.times()), y.tolist(), at_once)
    evaluate: Callable[..., torch.Tensor] = partial(network.forward, run=run)
    captures = network.captures and z.is_cuda
    scale: float | torch.Tensor = guidance.scale
    if captures:
        process.upload_tables(z.device)
        # On the device: one captured step serves every scale.
        scale = torch.full((), guidance.scale, dtype=torch.float32, device=z.device)
    if captures and not process.captured:
        evaluate = network.graphed(run, evaluate)

    def make_step(rules, scale, at, y, noise, *state):
        networks = []
        for i, rule in enumerate(rules):
            networks.append(partial(_guided, evaluate, rule, scale, at + i if i else at, y))
        return process.step(state, at, noise, networks)

    if captures and process.captured:
        make_step = network.graphed((process, run), make_step)

    state = process.begin(z)
    noise = z[:0]
    for number, evaluation, guidances in steps or steps_of(process, guidance):
        run.advance(*range(evaluation, evaluation + len(guidances)))
        if number < process.draws:
            noise = draw()
        at = indices[evaluation].expand(len(z))
        rules = tuple(each.rule() for each in guidances)
        state = make_step(rules, scale, at, y, noise, *state)
        if on_step is not None:
            on_step(number, state[0])
    return state[0]


def _guided(evaluate, rule, scale, at, y, x):
    """Evaluate the network at x (n, C, H, W), guided → (n, C', H, W) in x's dtype. at
    (n,): the index of the evaluation. y: the labels of all batch rows.
    """
    out = evaluate(x, at.repeat(rule.copies), y[: rule.copies * len(x)])
    return rule.combine(out, scale)
