"""A network, a process and a guidance, labels and a seed → latents."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from accel.errors import UsageError
from accel.network import Network, remedy
from accel.sampling import OnStep, denoise, initial_noise, steps_of, upstream_noise
from accel.sampling.guidance import Guidance, Unguided
from accel.sampling.process import Process

ALL = (slice(None),)


@contextmanager
def enough_memory(too_large: str) -> Iterator[None]:
    """Raise UsageError(too_large) where the block runs out of GPU memory."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise UsageError(too_large) from None


class Run(NamedTuple):
    """All values but labels and seed that decide latents, and the device."""

    network: Network
    process: Process
    guidance: Guidance | Unguided
    tier: str
    device: torch.device
    side: int  # of a latent
    too_large: str = "the pictures do not fit in free GPU memory; sample fewer at a time"  # error

    def denoise(
        self, z: Tensor, labels: Tensor, draw: Callable[[], Tensor], on_step: OnStep | None = None
    ) -> Tensor:
        """Return latents (n, C, L, L), as sampling.denoise. Raises UsageError if the
        batch does not fit in memory, and for latents that are not finite.
        """
        sums = torch.zeros(self.process.steps, device=self.device)  # read once, after the loop

        def after_step(index, x):
            torch.sum(x.flatten(), 0, out=sums[index])
            if on_step is not None:
                on_step(index, x)

        with enough_memory(self.too_large):
            latents = denoise(
                self.network, self.process, self.guidance, z, labels, draw, on_step=after_step
            )
        failed = torch.nonzero(~sums.isfinite())
        if len(failed):
            raise UsageError(
                f"`precision={self.tier}`: the latents are not finite from step "
                f"{int(failed[0]) + 1} of {len(sums)} on; "
                f"{remedy(self.network, self.tier, self.device)}"
            )
        return latents

    def latents(
        self,
        labels: Sequence[int],
        seed: int | Sequence[int],
        batches: Sequence[slice] = ALL,
        on_step: OnStep | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Return latents (n', C, L, L) of the slices `batches` of `labels`, from a seed or
        from a seed for each label; the same on every call.

        Of one seed each slice draws the noise of all labels and uses its own; a label with a
        seed of its own has the noise of a run of it alone. on_step counts the steps of all
        slices. noise (n, C, L, L): in place of z, which is drawn nevertheless: the noise of
        the steps stays the same.
        """
        found = []
        for part in batches:
            done = len(found) * self.process.steps
            count_on = on_step and (lambda index, x, done=done: on_step(done + index, x))
            z, y, draw = self._noise(labels, seed, part)
            z = z if noise is None else noise[part]
            found.append(self.denoise(z, y, draw, count_on))
        empty = torch.empty(0, self.network.in_channels, self.side, self.side, device=self.device)
        return torch.cat(found) if found else empty

    @torch.inference_mode()
    def estimate(self, x: Tensor, done: int, labels: Sequence[int]) -> Tensor:
        """Estimate the finished latents from latents x (n, C, L, L) after `done` steps,
        by one more evaluation.
        """
        step = steps_of(self.process, self.guidance)[done]
        t = self.process.times()[step.evaluation]
        guidance = step.guidances[0]
        y = guidance.labels(torch.tensor(labels, device=x.device))
        out = guidance.combine(self.network.forward(x, torch.full(y.shape, t, device=x.device), y))
        return self.process.finished(x, t, out[:, : x.shape[1]])

    def warm_up(self, labels: Sequence[int], batches: Sequence[slice] = ALL) -> None:
        """Make each kind of step of `latents` once, with each number of labels in a slice
        and each guidance: on a GPU this compiles kernels, chooses algorithms and captures
        graphs.
        """
        first = {}
        sizes = set()
        for step in steps_of(self.process, self.guidance):
            first.setdefault(step.guidances, step)
        # Most labels first: they need the largest conditioning table, and a new table
        # voids captured graphs.
        for part in sorted(batches, key=lambda part: -len(set(labels[part]))):
            if len(labels[part]) not in sizes:
                sizes.add(len(labels[part]))
                with enough_memory(self.too_large):
                    noise = self._noise(labels, 0, part)
                    denoise(
                        self.network, self.process, self.guidance, *noise, steps=[*first.values()]
                    )

    def _noise(self, labels, seed, part):
        """Return z (n', C, L, L), labels (n',) and the function that draws a step's
        noise, for a slice of `labels`.
        """
        y = torch.tensor(labels, device=self.device)[part]
        if isinstance(seed, int):
            z, draw = self._drawn(len(labels), seed, part)
            return z, y, draw
        alone = [self._drawn(1, of_label) for of_label in seed[part]]
        z = torch.cat([z for z, _ in alone])
        return z, y, lambda: torch.cat([draw() for _, draw in alone])

    def _drawn(self, n, seed, part=slice(None)):
        """Return z and the function that draws a step's noise, for a slice of n pictures."""
        generator = torch.Generator(self.device).manual_seed(seed)  # a run's own
        z = initial_noise(n, self.network.in_channels, self.side, generator)
        if self.process.noise_from_cpu and self.device.type != "cpu":
            generator = torch.Generator().manual_seed(seed)
        return z[part], upstream_noise(z, self.guidance.copies, part, generator)
