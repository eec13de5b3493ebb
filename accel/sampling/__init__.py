"""The denoising loop: noise → latents.

It depends on three interfaces only: a network, a process (accel/sampling/process.py) and
a guidance.

The random stream is upstream's: z of n latents, then at every step, also the last and
also DDIM's with η = 0, one normal draw of the whole guided batch. The null half's noise
is drawn and not used: both halves share their latents.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from accel.network import Network
from accel.sampling.guidance import Guidance, Unguided
from accel.sampling.process import Kind, Process

OnStep = Callable[[int, torch.Tensor], None]


class Move(NamedTuple):
    """A move of a run."""

    kind: Kind
    guidance: tuple[Guidance | Unguided, ...]  # of each of its evaluations
    step: int  # index of its first step
    evaluation: int  # index of its first evaluation


def moves_of(process: Process, guidance: Guidance | Unguided) -> list[Move]:
    """Return the moves of a run, in order."""
    found = []
    step = 0
    evaluation = 0
    parts = tuple(guidance.at(level) for level in process.levels())
    for steps, evaluations in process.moves:
        found.append(
            Move(
                (steps, evaluations), parts[evaluation : evaluation + evaluations], step, evaluation
            )
        )
        step = step + steps
        evaluation = evaluation + evaluations
    return found


def count_copies(process: Process, guidance: Guidance | Unguided) -> Counter[int]:
    """Count the evaluations of a run by their batch rows a latent."""
    return Counter(guidance.at(level).copies for level in process.levels())


def initial_noise(
    n: int, channels: int, latent_size: int, generator: torch.Generator
) -> torch.Tensor:
    """Draw the first normal of a run, z (n, C, L, L), on the generator's device."""
    return torch.randn(
        n, channels, latent_size, latent_size, generator=generator, device=generator.device
    )


def upstream_noise(
    z: torch.Tensor,
    copies: int,
    rows: slice = slice(None),
    generator: torch.Generator | None = None,
) -> Callable[[], torch.Tensor]:
    """Return a function that draws a step's noise (n', C, L, L) for `rows` of the batch z
    (n, C, L, L).

    copies: batch rows of a latent. generator: by default torch's own on z's device. A CPU
    generator draws on the CPU; its numbers are pinned and copied to z's device without
    waiting.
    """
    shape = (copies * len(z), *z.shape[1:])
    device = z.device if generator is None else generator.device
    how = dict(generator=generator, device=device, pin_memory=z.is_cuda and device.type == "cpu")
    # Draw 2n rows, use n': upstream's random stream.
    return lambda: torch.randn(shape, **how)[: len(z)][rows].to(z.device, non_blocking=True)


@torch.inference_mode()
def denoise(
    network: Network,
    process: Process,
    guidance: Guidance | Unguided,
    z: torch.Tensor,
    labels: torch.Tensor,
    draw: Callable[[], torch.Tensor],
    *,
    moves: list[Move] | None = None,
    on_step: OnStep | None = None,
) -> torch.Tensor:
    """Sample latents (n, C, L, L) from noise z (n, C, L, L) and labels (n,) on its
    device.

    draw: returns the noise of a step, like z. moves: some of `moves_of`, for warm-up;
    default: all. on_step(i, x): called when step i has been queued, with its result x (n,
    C, L, L).
    """
    y = guidance.labels(labels)
    every_move = moves_of(process, guidance)
    indices = torch.arange(process.evaluations, device=z.device)
    at_once = max(evaluations for _, evaluations in process.moves)
    scheduled, advance = network.schedule(process.times(), y.tolist(), at_once)
    captures = network.captures and z.is_cuda
    evaluate = scheduled.forward
    if captures:
        process.prepare(z.device)
    if captures and not process.captured:
        evaluate = network.replayed(tuple(process.times()), evaluate)

    def move(kind, parts, at, y, noise, *state):
        return process.move(kind, state, at, noise, partial(_guided, evaluate, parts, at, y))

    make = network.replayed((process, guidance), move) if captures and process.captured else move
    state = process.begin(z)
    noise = z[None, :0]
    for kind, parts, step, evaluation in moves or every_move:
        steps, evaluations = kind
        advance(*range(evaluation, evaluation + evaluations))
        if step < process.draws:
            drawn = [draw() for _ in range(steps)]  # ahead, in the stream's order
            noise = torch.stack(drawn) if steps > 1 else drawn[0][None]
        state = make(kind, parts, indices[evaluation].expand(len(z)), y, noise, *state)
        if on_step is not None:
            on_step(step + steps - 1, state[0])
    return state[0]


def _guided(evaluate, parts, at, y, x, number=0):
    """Evaluate the network at x (n, C, H, W), a move's `number`-th time, guided → (n, C',
    H, W) in x's dtype.
    """
    at = at + number if number else at
    guidance = parts[number]
    return guidance.combine(evaluate(x, at.repeat(guidance.copies), y[: guidance.copies * len(x)]))
