"""Noise and labels of an FID job: upstream's stream, or keyed by picture."""

from collections.abc import Callable
from functools import partial

import torch

from accel.fid.folder import Batches, Order
from accel.sampling import upstream_noise

Draw = Callable[[], torch.Tensor]  # → the noise of a step, (n, C, L, L)
Drawn = tuple[torch.Tensor, torch.Tensor, Draw]


def labels_of(order: Order, pictures: range, drawn: torch.Tensor) -> torch.Tensor:
    """Labels (n,) of `pictures`: `drawn`, or where they are balanced by the picture's number.

    `drawn` is drawn all the same, so the noise is that of a job with random labels.
    """
    if not order.balanced:
        return drawn
    return torch.tensor([number % order.num_classes for number in pictures], device=drawn.device)


class UpstreamNoise:
    """Upstream's stream on the device's own generator: seeded once a rank, then one batch after the other.

    A batch draws z, labels and the noise of its steps: 2n rows with guidance, n without.
    """

    def __init__(self, order: Order, batches: Batches, device: torch.device):
        self.order, self.batches, self.device, self.next = order, batches, device, None
        self.generators = [torch if device.type == "cpu" else torch.get_device_module(device)]  # whose state is kept
        if order.noise_from_cpu and device.type != "cpu":
            self.generators.append(torch)
        self.of_steps = torch.default_generator if order.noise_from_cpu else None

    def batch(self, batch: int, before: str | None) -> Drawn:
        """z (n, C, L, L), labels (n,) and what draws the noise of a step.

        before: the generator's state after this rank's batch before it (hexadecimal), where recorded.
        """
        order, device, n = self.order, self.device, self.order.batch_size
        if batch == self.batches.rank:  # the first of this rank
            torch.manual_seed(order.seed * self.batches.world + self.batches.rank)
        elif batch != self.next:
            for generator, state in zip(self.generators, before.split(), strict=True):
                generator.set_rng_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))
        self.next = batch + self.batches.world
        z = torch.randn(n, *order.latent, device=device)
        drawn = torch.randint(0, order.num_classes, (n,), device=device)
        draw = upstream_noise(z, order.copies, generator=self.of_steps)
        return z, labels_of(order, self.batches.pictures(batch), drawn), draw

    def state(self) -> str | None:
        """The generators' states after the last batch (hexadecimal)."""
        return " ".join(bytes(generator.get_rng_state().numpy()).hex() for generator in self.generators)


class PictureNoise:
    """Noise and label keyed by the picture's number, a generator each: whoever makes it draws the same."""

    def __init__(self, order: Order, batches: Batches, device: torch.device):
        self.order, self.batches, self.device = order, batches, device

    def batch(self, batch: int, before: str | None) -> Drawn:
        """z (n, C, L, L), labels (n,) and what draws the noise of a step."""
        order, device, pictures = self.order, self.device, self.batches.pictures(batch)
        # The odd factor keeps the seeds of one job apart in their low 32 bits, all that the CPU's generator takes.
        seeds = [(order.seed * 0x9E3779B97F4A7C15 + number) % 2**63 for number in pictures]
        generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

        def draw(make, *shape):
            return torch.stack([make(*shape, device=device, generator=generator) for generator in generators])

        labels = labels_of(order, pictures, draw(torch.randint, 0, order.num_classes, ()))
        noise = partial(draw, torch.randn, *order.latent)
        return noise(), labels, noise

    def state(self) -> str | None:
        """None: there is no stream."""
        return None
