"""A Pipeline: network × process × guidance × decoder, on a device, in a tier.

    run = open_run(Options(model="DiT-XL/2"))
    pipeline = Pipeline.load(run)
    latents = pipeline.latents([207, 360], seed=0)
    pixels = pipeline.decode(latents)

The commands, FID jobs, Sampler, scripts and benchmarks all sample with it. `Pipeline.load` and
the code below it see no `Options`.
"""

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel.checkpoints import Source
from accel.decoders import LatentSpace
from accel.decoders.decoder import Decoder, NoDecoder
from accel.distributed.placement import Placement
from accel.errors import Given, UsageError
from accel.families.spec import ModelSpec, StateDict
from accel.run.resolve import Run
from accel.runtime import precision
from accel.runtime.network import Batch, BlockNetwork, EagerNetwork, Network
from accel.sampling import (
    OnStep,
    count_by_rows,
    denoise,
    initial_noise,
    steps_of,
    upstream_noise,
)
from accel.sampling.guidance import Guidance, Unguided
from accel.sampling.process import Process

if TYPE_CHECKING:  # chooses GEMMs: other tiers need not wait for it
    from accel.kernels.linear import Tuner

log = logging.getLogger(__name__)

ALL_LABELS = (slice(None),)
SINGLE_PROCESS = Placement()
TOO_LARGE = "the pictures do not fit in free GPU memory; sample fewer at a time"


@contextmanager
def memory_errors(too_large: str) -> Iterator[None]:
    """Raise UsageError(too_large) where the block runs out of GPU memory."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise UsageError(too_large) from None


def free_memory(device: torch.device) -> None:
    """Free the memory of a network that nothing refers to any more, with its use_graph
    steps.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Pipeline:
    """Network, process, guidance and decoder in a tier on a device. Together with labels and
    a seed they determine the pictures.

    decoder: None if only latents are sampled. side: of a latent. placement: of this rank among
    those that share an evaluation. too_large: the error for a batch that does not fit in memory.
    """

    network: Network
    process: Process
    guidance: Guidance | Unguided
    decoder: Decoder | NoDecoder | None
    tier: str
    device: torch.device
    side: int
    placement: Placement = SINGLE_PROCESS
    too_large: str = TOO_LARGE

    @classmethod
    def load(
        cls,
        run: Run,
        sizes: Iterable[int] = (1,),
        *,
        placement: Placement = SINGLE_PROCESS,
        tuner: "Tuner | None" = None,
        keep_guide: bool = False,
        too_large: str = TOO_LARGE,
    ) -> "Pipeline":
        """Load the network and make the decoder, which loads its weights at its first use.

        sizes: numbers of pictures that a rank denoises at once; the network is tuned and
        checked for them. placement: of this rank among those that share an evaluation. tuner:
        chooses the GEMMs' algorithms. keep_guide: load also a guide that this scale of guidance
        does not use. Raises UsageError for weights that are missing or overflow the tier.
        """
        guide = run.guide
        if isinstance(run.guidance, Unguided) and not keep_guide:
            guide = None  # it would not be evaluated
        batch = _batch(run, placement, sizes)
        with precision.arithmetic(run.tier), memory_errors(too_large):
            network, tier = _load_checked(run, guide, run.tier, batch, tuner)
        decoder = None
        if run.space.decoder is not None:
            fallback = precision.float32_decoder(run.tier, run.device)
            # An FID job may spend seconds at the start to decode each picture faster.
            wanted = run["vae_precision"]
            decoder = decoder_of(run.space, run.device, wanted, fallback, run.is_fid_job)
        return cls(
            network,
            run.process,
            run.guidance,
            decoder,
            tier,
            run.device,
            run.latent_size,
            placement,
            too_large,
        )

    @property
    def machine(self) -> list[str]:
        """Return the tier, the hardware and torch's version, in words."""
        return [self.tier, hardware(self.device), f"torch {torch.__version__}"]

    def replaced(self, **parts: Any) -> "Pipeline":
        """Return a pipeline with other parts, such as process= or guidance=. It shares the
        network, its memory and its captured steps.
        """
        return replace(self, **parts)

    def latents(
        self,
        labels: Sequence[int],
        seed: int | Sequence[int],
        batches: Sequence[slice] = ALL_LABELS,
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
        shape = (0, self.network.in_channels, self.side, self.side)
        parts = [torch.empty(shape, device=self.device)]  # a rank may have no pictures
        for number, part in enumerate(batches):
            done = number * self.process.steps
            count_on = on_step and partial(_count_on, on_step, done)
            z, y, draw = self._noise(labels, seed, part)
            if noise is not None:
                z = noise[part]
            parts.append(self.denoise(z, y, draw, count_on))
        return torch.cat(parts)

    def denoise(
        self, z: Tensor, labels: Tensor, draw: Callable[[], Tensor], on_step: OnStep | None = None
    ) -> Tensor:
        """Return latents (n, C, L, L), as sampling.denoise. Raises UsageError if the batch
        does not fit in memory, and for latents that are not finite.
        """
        sums = torch.zeros(self.process.steps, device=self.device)  # read once, after the loop

        def after_step(index, x):
            torch.sum(x.flatten(), 0, out=sums[index])
            if on_step is not None:
                on_step(index, x)

        with precision.arithmetic(self.tier), memory_errors(self.too_large):
            latents = denoise(
                self.network, self.process, self.guidance, z, labels, draw, on_step=after_step
            )
        failed = torch.nonzero(~sums.isfinite())
        if len(failed):
            from accel.runtime.overflow import remedy  # most runs need none

            raise UsageError(
                f"the latents are not finite from step {int(failed[0]) + 1} of {len(sums)} on",
                remedy(self.network, self.tier, self.device),
                parameter="precision",
                value=self.tier,
            )
        return latents

    def decode(self, latents: Tensor) -> Tensor:
        """Return pixels (n, 3, H, W), about (-1, 1), of latents (n, C, L, L); n may be 0."""
        assert self.decoder is not None
        with precision.arithmetic(self.tier):
            return self.decoder.decode(latents)

    @torch.inference_mode()
    def estimate(self, x: Tensor, done: int, labels: Sequence[int]) -> Tensor:
        """Estimate the finished latents from latents x (n, C, L, L) after `done` steps, by
        one more evaluation.
        """
        step = steps_of(self.process, self.guidance)[done]
        t = self.process.times()[step.evaluation]
        guidance = step.guidances[0]
        y = guidance.labels(torch.tensor(labels, device=x.device))
        with precision.arithmetic(self.tier):
            out = self.network.forward(x, torch.full(y.shape, t, device=x.device), y)
        return self.process.predict_latents(
            x, t, guidance.combine(out, guidance.scale)[:, : x.shape[1]]
        )

    def warm_up(self, labels: Sequence[int], batches: Sequence[slice] = ALL_LABELS) -> None:
        """Make each kind of step of `latents` once, with each number of labels in a slice
        and each guidance: on a GPU this compiles kernels, chooses algorithms and captures
        graphs.
        """
        first: dict[Any, Any] = {}
        for step in steps_of(self.process, self.guidance):
            first.setdefault(step.guidances, step)
        sizes: set[int] = set()
        # Most labels first: they need the largest conditioning table, and a new table voids
        # captured graphs.
        by_labels: Callable[[slice], int] = lambda part: -len({*labels[part]})  # noqa: E731
        for part in sorted(batches, key=by_labels):
            if len(labels[part]) in sizes:
                continue
            sizes.add(len(labels[part]))
            noise = self._noise(labels, 0, part)
            with precision.arithmetic(self.tier), memory_errors(self.too_large):
                denoise(self.network, self.process, self.guidance, *noise, steps=[*first.values()])

    def network_from(self, source: Source) -> BlockNetwork:
        """Return a network of the same tier and shape with other weights, to copy them from; a
        guide is not among them. Raises UsageError if they overflow the tier.
        """
        counts = count_by_rows(self.process, self.guidance)
        rows = sorted(((1, rows) for rows in counts), reverse=True)
        batch = Batch(rows, self.side, source.spec.num_classes)
        from accel.runtime.overflow import require_finite

        with precision.arithmetic(self.tier), source.reading() as state:
            network = load_network(state, source.spec, source.given, self.tier, self.device, batch)
            require_finite(network, self.tier, batch, self.device, source.spec.some_times)
        return network

    def _noise(self, labels, seed, part):
        """Return z (n', C, L, L), labels (n',) and the function that draws a step's noise,
        for a slice of `labels`.
        """
        y = torch.tensor(labels, device=self.device)[part]
        if isinstance(seed, int):
            z, draw = self._draw_noise(len(labels), seed, part)
            return z, y, draw
        alone = [self._draw_noise(1, of_label) for of_label in seed[part]]
        z = torch.cat([z for z, _ in alone])
        return z, y, lambda: torch.cat([draw() for _, draw in alone])

    def _draw_noise(self, n, seed, part=slice(None)):
        """Return z and the function that draws a step's noise, for a slice of n pictures."""
        generator = torch.Generator(self.device).manual_seed(seed)  # for this run only
        z = initial_noise(n, self.network.in_channels, self.side, generator)
        if self.process.noise_from_cpu and self.device.type != "cpu":
            generator = torch.Generator().manual_seed(seed)
        return z[part], upstream_noise(z, self.guidance.noise_rows, part, generator)


def _count_on(on_step: OnStep, done: int, index: int, x: Tensor) -> None:
    """Report a step after `done` others."""
    on_step(done + index, x)


def hardware(device: torch.device) -> str:
    """Return the GPU's name, the CPU's number of threads, or the name of another device."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads > 1)}"


def decoder_of(
    space: LatentSpace,
    device: torch.device,
    precision: str = "fp32",
    fallback: str = "fp32",
    use_graph: bool = False,
) -> Decoder | NoDecoder:
    """Return the decoder of a space, in fp32, tf32 or fp16.

    fallback, use_graph: for fp16, as Float16Decoder takes them.
    """
    if space.files.kind.builtin_space is not None:
        return NoDecoder(space)
    if precision == "fp16":
        from accel.decoders.float16 import Float16Decoder  # float32 needs none

        return Float16Decoder(space, device, fallback, use_graph)
    return Decoder(space, device, precision)


def _batch(run: Run, placement: Placement, sizes: Iterable[int]) -> Batch:
    """Return the network evaluations of any rank, the most batch rows first."""
    rows = set()
    for copies in count_by_rows(run.process, run.guidance):
        rows |= {placement.rows(n, copies) for n in sizes}
    most_first = sorted(rows, key=lambda rows: (prod(rows), rows), reverse=True)
    columns = placement.layout.tokens
    return Batch(most_first, run.latent_size, run.spec.num_classes, columns)


def load_network(
    state: StateDict,
    spec: ModelSpec,
    given: Given,
    tier: str,
    device: torch.device,
    batch: Batch,
    tuner: "Tuner | None" = None,
) -> BlockNetwork:
    """Return the network of a tier, not tuned and not checked. Each weight goes from the
    mapped file to the device. state: under the names of the reference network.
    """
    model: Any = spec.empty(batch.side)
    table = state.get("pos_embed")
    # a function of the grid: any size will do
    if table is not None and table.shape != model.pos_embed.shape:
        from accel.tensors.positions import require_sinusoid  # other sizes need it

        require_sinusoid(given.error, table, "sample at the size that it was trained at")
        state = {**state, "pos_embed": model.position_table()}
    if precision.TIERS[tier].accelerated:
        pack = spec.family.pack
        from accel import fast  # brings Triton; the other tiers need not wait for it

        try:
            return fast.load(state, model, pack, tier, device, prod(batch.rows[0]), tuner)
        except UsageError:
            raise
        except ValueError as error:
            raise given.error(str(error)) from None
    # First to the device: of weights in half precision the CPU never holds a float32
    # copy. Strides decide rounding.
    state = {name: value.to(device).float().contiguous() for name, value in state.items()}
    model.load_state_dict(state, strict=True, assign=True)
    return EagerNetwork(model.eval().requires_grad_(False))


def _load_networks(
    run: Run, guide: Source | None, tier: str, batch: Batch, tuner: "Tuner | None"
) -> list[BlockNetwork]:
    """Return the network, and its guide if there is one."""
    networks = []
    for source in filter(None, (run.source, guide)):
        with source.reading() as state:
            networks.append(
                load_network(state, source.spec, source.given, tier, run.device, batch, tuner)
            )
    return networks


def _load_checked(
    run: Run, guide: Source | None, tier: str, batch: Batch, tuner: "Tuner | None"
) -> tuple[Network, str]:
    """Return a network that is tuned and does not overflow, with its guide if there is one, and
    their tier: bf16 in place of a float16 that either overflows, unless the user asked for it.
    """
    device = run.device
    networks = _load_networks(run, guide, tier, batch, tuner)
    for each in networks:
        each.tune(batch.row_tokens(each.patch_size))
    network: Network = networks[0]
    if guide is not None:
        from accel.sampling.autoguidance import WithGuide

        network = WithGuide(*networks)
    if not precision.TIERS[tier].accelerated or tier == "bf16":
        return network, tier
    from accel.runtime.overflow import overflows, remedy  # float32 holds all

    whose = " and ".join(
        name
        for name, each in zip(("these", "the guide's"), networks)
        if overflows(each, batch, device, run.spec.some_times)
    )
    if not whose:
        return network, tier
    if run.tier_is_given or tier == "exact" or not precision.supports("bf16", device):
        raise UsageError(
            f"overflows on {whose} weights",
            remedy(network, tier, device),
            parameter="precision",
            value=tier,
        )
    both = "" if guide is None else "by both networks "
    log.warning(f"{whose} weights overflow float16: sampling {both}in bfloat16")
    del network, networks, each  # free their memory first
    return _load_checked(run, guide, "bf16", batch, tuner)
