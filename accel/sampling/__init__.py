"""The denoising loop: noise → latents.

It knows a network, a process (accel/sampling/process.py) and a guidance as values, and none of their kinds.

The random stream is upstream's: z of n latents, then for every step, DDPM's last included, one normal of the whole
guided batch. The null half is never updated, since both halves are evaluated on the same latents; its noise is drawn
all the same, and so is DDIM's where η = 0.
"""

import copy
from collections.abc import Callable, Iterable

import torch

from accel.network import Network
from accel.sampling.guidance import Guidance, Unguided
from accel.sampling.process import Evaluations, Kind, Process

OnStep = Callable[[int, torch.Tensor], None]


def initial_noise(n: int, channels: int, latent_size: int, generator: torch.Generator) -> torch.Tensor:
    """The first normal of a run, z (n, C, L, L), on the generator's device."""
    shape = n, channels, latent_size, latent_size
    return torch.randn(shape, generator=generator, device=generator.device)


def upstream_noise(
    z: torch.Tensor, copies: int, rows: slice = slice(None), generator: torch.Generator | None = None
) -> Callable[[], torch.Tensor]:
    """What draws the noise of a step for `rows` of a batch that begins at z (n, C, L, L), (n', C, L, L).

    copies: batch rows of a latent. generator: default torch's own, of z's device. One of the CPU draws there, as SiT
    does: what it draws is pinned and copied to z's device, and nobody waits.
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
    moves: Iterable[Kind] | None = None,
    on_step: OnStep | None = None,
) -> torch.Tensor:
    """Noise z (n, C, L, L) and labels (n,) on its device → latents (n, C, L, L).

    draw: gives the noise of a step, like z. moves: other moves of the process than all of its own, for warm-up.
    on_step(i, x): called when step i has been queued, with its result x (n, C, L, L).
    """
    y, kinds = guidance.labels(labels), process.every_kind
    parts = [guidance.at(level) for level in process.levels()]
    indices = torch.arange(process.evaluations, device=z.device)
    scheduled, advance = network.schedule(process.times(), y.tolist(), max(count for _, count in kinds))

    def move(kind, guidance, at, y, noise, *state):
        return process.move(kind, state, at, noise, Evaluations(scheduled, guidance, at, y))

    if network.captures and z.is_cuda:
        process.prepare(z.device)
        if process.captured:
            move = network.replayed((process, guidance), move)
        else:
            tokens = network.replayed(tuple(process.times()), scheduled.tokens)
            scheduled = copy.copy(scheduled)
            scheduled.tokens = tokens
    state, noise, step, first = process.begin(z), z[None, :0], 0, 0
    for steps, evaluations in moves or process.moves:
        advance(*range(first, first + evaluations))
        if step < process.draws:
            drawn = [draw() for _ in range(steps)]  # ahead, in the stream's order
            noise = torch.stack(drawn) if steps > 1 else drawn[0][None]
        those = tuple(parts[first : first + evaluations])
        state = move((steps, evaluations), those, indices[first].expand(len(z)), y, noise, *state)
        step, first = step + steps, first + evaluations
        if on_step is not None:
            on_step(step - 1, state[0])
    return state[0]
