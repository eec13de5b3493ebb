"""A network, a process and a guidance, labels and a seed → latents."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from accel.errors import UsageError
from accel.loading import remedy
from accel.network import Network
from accel.sampling import OnStep, denoise, initial_noise, upstream_noise
from accel.sampling.guidance import Guidance, Unguided
from accel.sampling.process import Kind, Process


class Run(NamedTuple):
    """What latents depend on beside labels and seed, and where they are made."""

    network: Network
    process: Process
    guidance: Guidance | Unguided
    tier: str
    device: torch.device
    side: int  # of a latent

    def denoise(self, *what, on_step: OnStep | None = None, moves: Iterable[Kind] | None = None) -> Tensor:
        """Latents (n, C, L, L) of z, labels and draw, as sampling.denoise takes them. Raises UsageError, naming the
        step and a remedy, if they are not finite."""
        sums = torch.zeros(self.process.steps, device=self.device)  # read once, after the loop

        def after_step(index, x):
            torch.sum(x.flatten(), 0, out=sums[index])
            if on_step is not None:
                on_step(index, x)

        how = dict(moves=moves, on_step=after_step)
        latents = denoise(self.network, self.process, self.guidance, *what, **how)
        failed = torch.nonzero(~sums.isfinite())
        if len(failed):
            raise UsageError(
                f"`precision={self.tier}`: the latents are not finite from step {int(failed[0]) + 1} of {len(sums)} "
                f"on; {remedy(self.network, self.tier, self.device)}"
            )
        return latents

    def latents(
        self,
        labels: Sequence[int],
        seed: int,
        rows: slice = slice(None),
        at_once: int | None = None,
        on_step: OnStep | None = None,
        moves: Iterable[Kind] | None = None,
    ) -> Tensor:
        """Latents (n', C, L, L) of the part `rows` of `labels`, from a seed; the same on every call.

        Of more than `at_once` one slice after the other; each draws the noise of all and uses its own. on_step counts
        the steps of all slices. moves: as sampling.denoise has them.
        """
        found, channels = [], self.network.in_channels
        y = torch.tensor(labels, device=self.device)
        for part in slices(rows, len(labels), at_once):
            generator = torch.Generator(self.device).manual_seed(seed)  # a run's own
            z = initial_noise(len(labels), channels, self.side, generator)
            if self.process.noise_from_cpu and self.device.type != "cpu":
                generator = torch.Generator().manual_seed(seed)
            done, draw = len(found) * self.process.steps, upstream_noise(z, self.guidance.copies, part, generator)
            count_on = on_step and (lambda index, x, done=done: on_step(done + index, x))
            found.append(self.denoise(z[part], y[part], draw, on_step=count_on, moves=moves))
        return torch.cat(found) if found else torch.empty(0, channels, self.side, self.side, device=self.device)


def slices(rows: slice, n: int, at_once: int | None) -> list[slice]:
    """The part `rows` of n, no more than `at_once` in each."""
    first, end, _ = rows.indices(n)
    size = at_once or max(1, end - first)
    return [slice(start, min(start + size, end)) for start in range(first, end, size)]
