"""Noise and labels of an FID job: from upstream's random stream, or seeded per picture."""

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from accel.jobs.fid.folder import Batches
from accel.sampling import upstream_noise
from accel.sampling.process import Process

# z (n, C, L, L), labels (n,) and a function that draws the noise of one step
BatchNoise = tuple[Tensor, Tensor, Callable[[], Tensor]]


def labels_of(batches: Batches, batch: int, drawn: Tensor) -> Tensor:
    """Return labels (n,) of a batch in the plan's `LabelOrder`. drawn (n,): random labels. They
    are also drawn for "by_number", so that the noise does not depend on the order.
    """
    plan = batches.plan
    classes = plan.num_classes
    pictures = batches.pictures(batch)
    if plan.labels == "random":
        return drawn
    if plan.labels == "permuted":
        all_labels = permuted_labels(plan.count, classes, plan.seed, batches.total)
        first = batches.first_of_rank(batch)
        return all_labels[first : first + len(pictures)].to(drawn.device)
    if plan.labels == "by_number":
        labels = [number % classes for number in pictures]
    else:
        last = classes - 1  # for pictures beyond the plan's count
        labels = [min(number * classes // plan.count, last) for number in pictures]
    return torch.tensor(labels, device=drawn.device)


@lru_cache(maxsize=1)
def permuted_labels(count: int, num_classes: int, seed: int, total: int) -> Tensor:
    """Return labels (total,): count // num_classes of each class in random order, then random
    labels, all from a CPU generator seeded with `seed`.
    """
    generator = torch.Generator().manual_seed(seed)
    balanced = torch.arange(num_classes).repeat_interleave(count // num_classes)
    permutation = torch.randperm(len(balanced), generator=generator)
    rest = torch.randint(0, num_classes, (total - len(balanced),), generator=generator)
    return torch.cat([balanced[permutation], rest])


class UpstreamNoise:
    """Upstream's random stream: the device's default generator, seeded once per rank.

    Each batch draws z, labels (not for "class_by_class" and "permuted") and the noise of its
    steps, n · `Plan.drawn` rows each.
    """

    def __init__(self, batches: Batches, device: torch.device, process: Process):
        plan = batches.plan
        self.batches = batches
        self.device = device
        self.step_generator = torch.default_generator if process.noise_from_cpu else None
        world = 1 if plan.labels == "class_by_class" else batches.world
        torch.manual_seed(plan.seed * world + batches.rank)

    def batch(self, batch: int) -> BatchNoise:
        """Draw z and labels of this rank's next batch. Draw the noise of all steps before calling
        this again.
        """
        plan = self.batches.plan
        device = self.device
        n = plan.batch_size
        z = torch.randn(n, *plan.latent, device=device)
        drawn = z[:0]
        if plan.labels in ("random", "by_number"):
            drawn = torch.randint(0, plan.num_classes, (n,), device=device)
        draw = upstream_noise(z, plan.drawn, generator=self.step_generator)
        return z, labels_of(self.batches, batch, drawn), draw


class PictureNoise:
    """Noise and labels from one generator per picture, independent of rank and batch size."""

    def __init__(self, batches: Batches, device: torch.device, process: Process):
        self.batches = batches
        self.device = device

    def batch(self, batch: int) -> BatchNoise:
        """Draw z and labels of a batch."""
        plan = self.batches.plan
        device = self.device
        pictures = self.batches.pictures(batch)
        # The odd factor makes the low 32 bits of a job's seeds distinct: the CPU generator uses
        # only those bits.
        seeds = [(plan.seed * 0x9E3779B97F4A7C15 + number) % 2**63 for number in pictures]
        generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

        def draw(make, *arguments):
            values = [
                make(*arguments, device=device, generator=generator) for generator in generators
            ]
            return torch.stack(values)

        drawn = draw(torch.randint, 0, plan.num_classes, ())
        draw_step = partial(draw, torch.randn, *plan.latent)
        return draw_step(), labels_of(self.batches, batch, drawn), draw_step
