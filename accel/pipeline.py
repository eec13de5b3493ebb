"""A Pipeline of network, process, guidance and decoder, on a device, in a precision tier.

    run = open_run(Request.open(Options(model="DiT-XL/2")))
    pipeline = Pipeline.load(run)
    latents = pipeline.latents([207, 360], seed=0)
    pixels = pipeline.decode(latents)

All jobs, Sampler, scripts and benchmarks sample with it.
"""

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from accel.checkpoints import Checkpoint
from accel.config.options import USER
from accel.decoders import LatentSpace
from accel.decoders.decoder import Decoder
from accel.distributed import Placement
from accel.errors import UsageError
from accel.run import Run
from accel.runtime import precision
from accel.runtime.network import Batch, BlockNetwork, Network
from accel.runtime.overflow import overflows, remedy, require_finite
from accel.sampling import (
    OnStep,
    count_by_rows,
    denoise,
    steps_of,
    upstream_noise,
)
from accel.sampling.guidance import Guidance, Unguided
from accel.sampling.process import Process

if TYPE_CHECKING:  # lazy: only for accelerated tiers
    from accel.kernels.linear import Tuner

log = logging.getLogger(__name__)

SINGLE_PROCESS = Placement()


@contextmanager
def memory_errors(too_large: str) -> Iterator[None]:
    """Convert running out of GPU memory to UsageError(too_large)."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise UsageError(too_large) from None


def free_memory(device: torch.device) -> None:
    """Free the memory of deleted networks and their CUDA graphs."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


class Generators(NamedTuple):
    """The random numbers of a run: `start` draws z, `steps` the noise of the steps."""

    start: torch.Generator
    steps: torch.Generator


@dataclass(frozen=True)
class Pipeline:
    """All that determines the pictures of given labels and seed.

    decoder: None if only latents are sampled. side: of the latents. too_large: message for a batch
    that does not fit in memory. placement: this rank's share. batch_size: most pictures to sample
    at a time; None: all.
    """

    network: Network
    process: Process
    guidance: Guidance | Unguided
    decoder: Decoder | None
    tier: str
    device: torch.device
    side: int
    too_large: str
    placement: Placement = SINGLE_PROCESS
    batch_size: int | None = None

    @classmethod
    def load(
        cls,
        run: Run,
        *,
        sizes: Iterable[int] | None = None,
        placement: Placement = SINGLE_PROCESS,
        tuner: "Tuner | None" = None,
        keep_guide: bool = False,
    ) -> "Pipeline":
        """Load the network and create the decoder, which loads its weights at its first use.

        sizes: batch sizes for which the network is tuned and checked; default: a grid's. placement:
        this rank's share. tuner: chooses the GEMM algorithms. keep_guide: load the guide even if
        the guidance scale does not use it. Raises UsageError if weights are missing or overflow the
        tier.
        """
        settings = run.settings
        option = "per_proc_batch_size" if run.is_fid_job else "batch_size"
        too_large = (
            f"`{option}={getattr(settings, option) or run.count}`: does not fit in free GPU "
            f"memory; use a smaller one, or a smaller `image_size` than {settings.image_size}"
        )
        checkpoints = [run.checkpoint]
        if run.guide is not None and (keep_guide or not isinstance(run.guidance, Unguided)):
            checkpoints.append(run.guide)
        if sizes is None:
            sizes = placement.sizes(run.count, settings.batch_size)
        copies = count_by_rows(run.process, run.guidance)
        rows = {placement.rows(n, each) for n in sizes for each in copies}
        batch = Batch(
            sorted(rows, key=lambda rows: (prod(rows), rows), reverse=True),
            run.latent_size,
            run.spec.num_classes,
            placement.layout.tokens,
        )
        with precision.arithmetic(settings.precision), memory_errors(too_large):
            network, tier = _load_checked(run, checkpoints, settings.precision, batch, tuner)
        decoder = None
        if run.space.decoder is not None:
            fallback = precision.float32_decoder(settings.precision, run.device)
            decoder = decoder_of(
                run.space,
                run.device,
                settings.vae_precision,
                fallback,
                # Capturing a CUDA graph takes seconds, which only an FID job regains.
                use_graph=run.is_fid_job,
            )
        return cls(
            network,
            run.process,
            run.guidance,
            decoder,
            tier,
            run.device,
            run.latent_size,
            too_large,
            placement,
            settings.batch_size,
        )

    @property
    def machine(self) -> list[str]:
        """The tier, the hardware and torch's version, as text."""
        threads = torch.get_num_threads()
        hardware = f"CPU, {threads} thread{'s' * (threads > 1)}"
        if self.device.type != "cpu":
            is_gpu = self.device.type == "cuda"
            hardware = torch.cuda.get_device_name(self.device) if is_gpu else str(self.device)
        return [self.tier, hardware, f"torch {torch.__version__}"]

    def batches(self, n: int) -> list[slice]:
        """Return the batches that this rank samples, as slices of n pictures."""
        return self.placement.batches(n, self.batch_size)

    def latents(
        self,
        labels: Sequence[int],
        seed: int | Sequence[int] | Generators,
        on_step: OnStep | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Sample the latents (n', C, L, L) of this rank's `batches` of labels. Deterministic.

        seed: an integer, for which each batch draws the noise of all labels and uses its part; or
        one seed per label, for the noise of a run with only that label; or generators, which
        continue and are left at the end of this run's noise. on_step: counts the steps
        of all batches. noise (n, C, L, L): replaces z, which is drawn nevertheless, so that the
        noise of the steps does not change.
        """
        shape = (0, self.network.in_channels, self.side, self.side)
        parts = [torch.empty(shape, device=self.device)]  # in case of no batches
        generators = seed if isinstance(seed, Generators) else ()
        states = [generator.get_state() for generator in generators]
        for number, part in enumerate(self.batches(len(labels))):
            for generator, state in zip(generators, states):
                generator.set_state(state)  # each batch draws the noise of all labels
            z, y, draw = self._noise(labels, seed, part)
            if noise is not None:
                z = noise[part]
            parts.append(self.denoise(z, y, draw, on_step, number * self.process.steps))
        return torch.cat(parts)

    def denoise(
        self,
        z: Tensor,
        labels: Tensor,
        draw: Callable[[], Tensor],
        on_step: OnStep | None = None,
        done: int = 0,
    ) -> Tensor:
        """Denoise z (n, C, L, L), see sampling.denoise. done: steps of earlier batches, which
        `on_step` counts too. Raises UsageError if the batch does not fit in memory or latents
        become non-finite.
        """
        sums = torch.zeros(self.process.steps, device=self.device)  # read after the loop

        def after_step(index, x):
            torch.sum(x.flatten(), 0, out=sums[index])
            if on_step is not None:
                on_step(done + index, x)

        with precision.arithmetic(self.tier), memory_errors(self.too_large):
            latents = denoise(
                self.network, self.process, self.guidance, z, labels, draw, on_step=after_step
            )
        failed = torch.nonzero(~sums.isfinite())
        if len(failed):
            raise UsageError(
                f"the latents are not finite from step {int(failed[0]) + 1} of {len(sums)} on",
                remedy(self.network, self.tier, self.device),
                parameter="precision",
                value=self.tier,
            )
        return latents

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents (n, C, L, L) to pixels (n, 3, H, W), about (-1, 1). n may be 0."""
        assert self.decoder is not None
        with precision.arithmetic(self.tier):
            return self.decoder.decode(latents)

    @torch.inference_mode()
    def estimate(self, x: Tensor, done: int, labels: Sequence[int]) -> Tensor:
        """Predict the final latents from x (n, C, L, L) after `done` steps, with one evaluation."""
        step = steps_of(self.process, self.guidance)[done]
        t = self.process.times()[step.evaluation]
        guidance = step.guidances[0]
        y = guidance.labels(torch.tensor(labels, device=x.device))
        with precision.arithmetic(self.tier):
            out = self.network.forward(x, torch.full(y.shape, t, device=x.device), y)
        return self.process.predict_latents(
            x, t, guidance.combine(out, guidance.scale)[:, : x.shape[1]]
        )

    def warm_up(self, labels: Sequence[int]) -> None:
        """Run one step of `latents` for each guidance and batch size. On a GPU this compiles
        kernels, chooses algorithms and captures graphs.
        """
        first: dict[Any, Any] = {}
        for step in steps_of(self.process, self.guidance):
            first.setdefault(step.guidances, step)
        sizes: set[int] = set()
        # Most labels first: a larger conditioning table invalidates captured graphs.
        by_labels: Callable[[slice], int] = lambda part: -len(set(labels[part]))  # noqa: E731
        for part in sorted(self.batches(len(labels)), key=by_labels):
            if len(labels[part]) in sizes:
                continue
            sizes.add(len(labels[part]))
            noise = self._noise(labels, 0, part)
            with precision.arithmetic(self.tier), memory_errors(self.too_large):
                denoise(self.network, self.process, self.guidance, *noise, steps=[*first.values()])

    def network_from(self, checkpoint: Checkpoint) -> BlockNetwork:
        """Load a network with the same tier and sizes but other weights, to copy them from, without
        a guide. Raises UsageError if the weights overflow the tier.
        """
        counts = count_by_rows(self.process, self.guidance)
        rows = sorted(((1, rows) for rows in counts), reverse=True)
        batch = Batch(rows, self.side, checkpoint.spec.num_classes)
        times = checkpoint.spec.family.some_times
        with precision.arithmetic(self.tier):
            network = checkpoint.build(self.tier, self.device, batch)
            require_finite(network, self.tier, batch, self.device, times)
        return network

    def _noise(self, labels, seed, part):
        """Return z (n', C, L, L), labels (n',) and a function that draws a step's noise, for the
        slice `part` of `labels`.
        """
        y = torch.tensor(labels, device=self.device)[part]
        if isinstance(seed, int):
            seed = self.generators(seed)
        if isinstance(seed, Generators):
            z, draw = self._draw_noise(len(labels), seed, part)
            return z, y, draw
        single = [self._draw_noise(1, self.generators(of_label)) for of_label in seed[part]]
        z = torch.cat([z for z, _ in single])
        return z, y, lambda: torch.cat([draw() for _, draw in single])

    def generators(self, seed: int) -> Generators:
        """Return the generators of a seed; the global ones stay as they are."""
        generator = torch.Generator(self.device).manual_seed(seed)
        if self.process.noise_from_cpu and self.device.type != "cpu":
            return Generators(generator, torch.Generator().manual_seed(seed))
        return Generators(generator, generator)

    def skip(self, labels: Sequence[int], generators: Generators) -> None:
        """Advance generators to the end of one run's noise."""
        _, _, draw = self._noise(labels, generators, slice(None))
        for _ in range(self.process.noise_draws):
            draw()

    def _draw_noise(self, n, generators, part=slice(None)):
        """Return z and a function that draws a step's noise, for the slice `part` of n pictures."""
        generator = generators.start
        shape = (n, self.network.in_channels, self.side, self.side)
        z = torch.randn(shape, generator=generator, device=generator.device)
        return z[part], upstream_noise(z, self.guidance.noise_rows, part, generators.steps)


def decoder_of(
    space: LatentSpace,
    device: torch.device,
    precision: str = "fp32",
    fallback: str = "fp32",
    use_graph: bool = False,
) -> Decoder:
    """Create a decoder in fp32, tf32 or fp16. fallback, use_graph: as for Float16Decoder."""
    if space.files.kind.builtin_space is not None:
        precision = "fp32"  # nothing is computed
    if precision == "fp16":
        from accel.decoders.float16 import Float16Decoder  # lazy: only for fp16

        return Float16Decoder(space, device, fallback, use_graph)
    return Decoder(space, device, precision)


def _load_checked(
    run: Run, checkpoints: list[Checkpoint], tier: str, batch: Batch, tuner: "Tuner | None"
) -> tuple[Network, str]:
    """Load, tune and check the network and its guide, and return their tier: bf16 if one of them
    overflows fp16, unless the user requested fp16.
    """
    device = run.device
    networks = [each.build(tier, device, batch, tuner) for each in checkpoints]
    for each in networks:
        each.tune(batch.row_tokens(each.patch_size))
    network: Network = networks[0]
    if len(networks) > 1:
        from accel.sampling.autoguidance import WithGuide

        network = WithGuide(*networks)
    if not precision.TIERS[tier].accelerated or tier == "bf16":
        return network, tier
    overflowing = " and ".join(
        name
        for name, each in zip(("these", "the guide's"), networks)
        if overflows(each, batch, device, run.spec.family.some_times)
    )
    if not overflowing:
        return network, tier
    is_given = run.settings.origins["precision"] == USER
    if is_given or tier == "exact" or not precision.supports("bf16", device):
        raise UsageError(
            f"overflows on {overflowing} weights",
            remedy(network, tier, device),
            parameter="precision",
            value=tier,
        )
    log.warning(f"{overflowing} weights overflow float16: sampling in bfloat16")
    del network, networks, each  # free their memory first
    return _load_checked(run, checkpoints, "bf16", batch, tuner)
