"""Noise and labels of an FID job: upstream's stream, or keyed by picture."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from accel.fid.folder import Batches
from accel.options import DistributedOptions

if TYPE_CHECKING:
    from accel.engine import Engine

Drawn = tuple[torch.Tensor, torch.Tensor, Callable[[], torch.Tensor] | None]


def labels_of(options: DistributedOptions, pictures: range, drawn: torch.Tensor) -> torch.Tensor:
    """Labels (n,) of `pictures`: `drawn`, or with --balanced-labels by the picture's number.

    `drawn` is drawn all the same, so the noise is that of a job with random labels.
    """
    if not options.balanced_labels:
        return drawn
    return torch.tensor([number % options.num_classes for number in pictures], device=drawn.device)


class UpstreamNoise:
    """Upstream's stream on the device's own generator: seeded once a rank, then one batch after the other.

    A batch draws z, labels and the noise of its steps: 2n rows with guidance, n without.
    """

    def __init__(self, engine: "Engine", batches: Batches):
        self.engine, self.batches, self.next = engine, batches, None
        self.module = torch if engine.device.type == "cpu" else torch.get_device_module(engine.device)

    def batch(self, batch: int, before: str | None) -> Drawn:
        """z (n, C, L, L), labels (n,), and None: the steps draw from the same stream.

        before: the generator's state after this rank's batch before it (hexadecimal), where recorded.
        """
        options, device, n = self.engine.options, self.engine.device, self.batches.n
        if batch == self.batches.rank:  # the first of this rank
            torch.manual_seed(options.seed * self.batches.world + self.batches.rank)
        elif batch != self.next:
            self.module.set_rng_state(torch.frombuffer(bytearray.fromhex(before), dtype=torch.uint8))
        self.next = batch + self.batches.world
        z = torch.randn(n, self.engine.network.in_channels, options.latent_size, options.latent_size, device=device)
        drawn = torch.randint(0, options.num_classes, (n,), device=device)
        return z, labels_of(options, self.batches.pictures(batch), drawn), None

    def state(self) -> str | None:
        """The generator's state after the last batch (hexadecimal)."""
        return bytes(self.module.get_rng_state().numpy()).hex()


class PictureNoise:
    """Noise and label keyed by the picture's number, a generator each: whoever makes it draws the same."""

    def __init__(self, engine: "Engine", batches: Batches):
        self.engine, self.batches = engine, batches

    def batch(self, batch: int, before: str | None) -> Drawn:
        """z (n, C, L, L), labels (n,) and what draws the noise of a step (n, C, L, L)."""
        options, device = self.engine.options, self.engine.device
        # The odd factor keeps the seeds of one job apart in their low 32 bits, all that the CPU's generator takes.
        seeds = [(options.seed * 0x9E3779B97F4A7C15 + number) % 2**63 for number in self.batches.pictures(batch)]
        generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

        def draw(make, *shape):
            return torch.stack([make(*shape, device=device, generator=generator) for generator in generators])

        drawn = draw(torch.randint, 0, options.num_classes, ())
        labels = labels_of(options, self.batches.pictures(batch), drawn)
        noise = partial(draw, torch.randn, self.engine.network.in_channels, options.latent_size, options.latent_size)
        return noise(), labels, noise

    def state(self) -> str | None:
        """None: there is no stream."""
        return None
