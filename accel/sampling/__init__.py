"""The denoising loop: noise → latents.

It depends on three interfaces only: a network, a process (accel/sampling/process.py) and a guidance.

The random stream is upstream's: z of n latents, then for every step, DDPM's last included, one normal of the whole
guided batch. The null half is never updated, since both halves are evaluated on the same latents; its noise is drawn
all the same, and so is DDIM's where η = 0.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch

from accel.network import Network
from accel.sampling.guidance import Guidance, Unguided
from accel.sampling.process import Evaluations, Kind, Process

OnStep = Callable[[int, torch.Tensor], None]


class Move(NamedTuple):
    """A move of a run."""

    kind: Kind
    guidance: tuple[Guidance | Unguided, ...]  # of each of its evaluations
    step: int  # index of its first step
    evaluation: int  # index of its first evaluation


def moves_of(process: Process, guidance: Guidance | Unguided) -> list[Move]:
    """The moves of a run, in order."""
    found, step, evaluation = [], 0, 0
    parts = tuple(guidance.at(level) for level in process.levels())
    for steps, evaluations in process.moves:
        found.append(Move((steps, evaluations), parts[evaluation : evaluation + evaluations], step, evaluation))
        step, evaluation = step + steps, evaluation + evaluations
    return found


def unlike(moves: list[Move]) -> list[Move]:
    """The first move of each kind and guidance: enough to warm up and to capture all."""
    first = {(move.kind, move.guidance): move for move in reversed(moves)}
    return sorted(first.values(), key=lambda move: move.step)


def count_copies(process: Process, guidance: Guidance | Unguided) -> Counter[int]:
    """Batch rows of a latent → how many evaluations of a run have so many."""
    return Counter(guidance.at(level).copies for level in process.levels())


def initial_noise(n: int, channels: int, latent_size: int, generator: torch.Generator) -> torch.Tensor:
    """The first normal of a run, z (n, C, L, L), on the generator's device."""
    shape = n, channels, latent_size, latent_size
    return torch.randn(shape, generator=generator, device=generator.device)


def upstream_noise(
    z: torch.Tensor, copies: int, rows: slice = slice(None), generator: torch.Generator | None = None
) -> Callable[[], torch.Tensor]:
    """What draws the noise of a step for `rows` of a batch that begins at z (n, C, L, L), (n', C, L, L).

    copies: batch rows of a latent. generator: default torch's own, of z's device. A generator of the CPU draws there,
    as flows do: its numbers are pinned and copied to z's device, and nobody waits.
    """
    shape, device = (copies * len(z), *z.shape[1:]), z.device if generator is None else generator.device
    how = dict(generator=generator, device=device, pin_memory=z.is_cuda and device.type == "cpu")
    # Draw 2n rows, use these n': upstream's random stream.
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
    """Noise z (n, C, L, L) and labels (n,) on its device → latents (n, C, L, L).

    draw: gives the noise of a step, like z. moves: some of `moves_of`, for warm-up; default: all.
    on_step(i, x): called when step i has been queued, with its result x (n, C, L, L).
    """
    y, every_move = guidance.labels(labels), moves_of(process, guidance)
    indices = torch.arange(process.evaluations, device=z.device)
    at_once = max(evaluations for _, evaluations in process.moves)
    scheduled, advance = network.schedule(process.times(), y.tolist(), at_once)
    captures, evaluate = network.captures and z.is_cuda, scheduled.tokens
    if captures:
        process.prepare(z.device)
    if captures and not process.captured:
        evaluate = network.replayed(tuple(process.times()), evaluate)

    def move(kind, guidance, at, y, noise, *state):
        return process.move(kind, state, at, noise, Evaluations(scheduled, evaluate, guidance, at, y))

    make = network.replayed((process, guidance), move) if captures and process.captured else move
    state, noise = process.begin(z), z[None, :0]
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
