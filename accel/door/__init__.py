"""Build network, process, guidance and decoder from settings, for the
commands, accel.api, scripts/ and bench/. Nothing below knows settings. FID jobs: fid.py.

`ready` opens a request and builds all that one process needs; `latents` or `sample` runs
it, `save` writes.
"""

import statistics
import time
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel import loading, output, precision
from accel.diffusion import create_diffusion
from accel.door.opening import open_weights
from accel.errors import UsageError
from accel.latents.decoder import Decoder
from accel.network import WHOLE, Batch, Part
from accel.progress import Stopwatch, step_bar
from accel.ranks.placement import Placement
from accel.request import Request
from accel.run import Run, enough_memory
from accel.sampling import OnStep, count_copies
from accel.sampling.ancestral import Ancestral, Ddim
from accel.sampling.flow import FLOWS
from accel.sampling.guidance import Guidance, Unguided
from accel.sampling.process import Process
from accel.sampling.solvers import SOLVERS, Solver, make_scheduler
from accel.settings import GridSettings, Settings
from accel.weights import Weights

if TYPE_CHECKING:  # a grid of one process does not wait for these
    from accel.kernels.linear import Tuner

ALONE = Placement()


def ready(request: Request, weights: Weights | None = None) -> tuple[Settings, Run, Decoder | None]:
    """Return the settings, run and decoder of a request, for this process alone. weights:
    in place of the request's.
    """
    settings = open_weights(request, loading.choose_device(request.device), weights)
    return settings, load(settings), decoder_of(settings)


def guidance_of(settings: Settings) -> Guidance | Unguided:
    if not settings.guided:
        return Unguided()
    return Guidance(
        settings.cfg_scale,
        settings.num_classes,
        settings.guidance_channels,
        settings.guidance_interval,
    )


def process_of(settings: Settings, scheduler: Any = None) -> Process:
    """Return the process of a run. scheduler: of diffusers, in place of the settings'
    sampler. Raises UsageError for a flow with a scheduler.
    """
    steps = settings.num_sampling_steps
    sampler = settings.sampler
    family = settings.fit.family
    if scheduler is not None:
        if family.prediction == "noise":
            return Solver(scheduler, steps)
        others = ", ".join(family.samplers)
        raise UsageError(
            f"`sampler`: a scheduler takes estimates of noise, and this is a flow; give {others}"
        )
    if sampler in FLOWS:
        return FLOWS[sampler](steps, settings.timestep_shift)
    diffusion = create_diffusion(str(steps), learn_sigma=settings.fit.learn_sigma)
    if sampler in SOLVERS:
        return Solver(make_scheduler(sampler), steps)
    return Ddim(diffusion, settings.eta) if sampler == "ddim" else Ancestral(diffusion)


def batch_of(
    settings: Settings,
    process: Process,
    guidance: Guidance | Unguided,
    placement: Placement = ALONE,
    sizes: Iterable[int] | None = None,
) -> Batch:
    """Return a run's network evaluations on any rank. sizes: pictures that are denoised
    at once; default: a grid's.
    """
    sizes = sizes or placement.sizes(len(settings.labels), settings.batch_size)
    rows = {placement.rows(n, copies) for n in sizes for copies in count_copies(process, guidance)}
    most_first = sorted(rows, key=lambda rows: (prod(rows), rows), reverse=True)
    return Batch(most_first, settings.latent_size, settings.num_classes)


def load(
    settings: Settings,
    placement: Placement = ALONE,
    sizes: Iterable[int] | None = None,
    tuner: "Tuner | None" = None,
    part: Part = WHOLE,
) -> Run:
    """Load the network and return the run. placement, sizes: as for `batch_of`; tuner,
    part: as for loading.load.
    """
    process = process_of(settings)
    guidance = guidance_of(settings)
    trained = settings.fit.trained_size(settings.space.factor)
    if trained not in (None, settings.image_size):
        print(
            f"{settings.model}: weights trained at {trained} px, sampling at "
            f"{settings.image_size} px"
        )
    batch = batch_of(settings, process, guidance, placement, sizes)
    fixed = settings.request.tier is not None
    weights = settings.weights
    fit = settings.fit
    tier = settings.tier
    device = settings.device
    with enough_memory(settings.too_large):
        network, tier = loading.load(
            weights, fit, tier, device, batch, fixed=fixed, tuner=tuner, part=part
        )
    return Run(network, process, guidance, tier, device, settings.latent_size, settings.too_large)


def decoder_of(settings: Settings, captured: bool = False) -> Decoder | None:
    """Return the decoder, not loaded yet; None for latents. captured: for many pictures,
    as for Decoder.
    """
    if settings.output_type == "latent":
        return None
    otherwise = precision.float32_decoder(settings.tier, settings.device)
    return Decoder(settings.space, settings.device, settings.vae_precision, otherwise, captured)


def describe(settings: Settings, run: Run, ranks: int | None = None) -> str:
    """Return the line that announces a run. ranks: their number, in a command of many."""
    gpu = run.device.type == "cuda"
    where = (
        torch.cuda.get_device_name(run.device) if gpu else f"CPU, {torch.get_num_threads()} threads"
    )
    return (
        f"{settings.model} · {settings.image_size} px · {settings.pictures} · "
        f"{steps_and_guidance(settings)} · {run.tier} · {where} · torch {torch.__version__}"
        + (f" · {ranks} rank{'s' * (ranks > 1)}" if ranks else "")
    )


def steps_and_guidance(settings: Settings) -> str:
    """Describe steps and guidance."""
    by = "" if settings.sampler == "ddpm" else f"{settings.sampler.upper()} "
    by += f"shift {settings.timestep_shift:g} " * (settings.timestep_shift != 1)
    low, high = settings.guidance_interval
    interval = "" if (low, high) == (0, 1) else f" at levels {low:g} to {high:g}"
    usual = settings.guidance_channels == Guidance.channels
    channels = (
        "" if usual or settings.cfg_scale == 1 else f" on {settings.guidance_channels} channels"
    )
    return (
        f"{settings.num_sampling_steps} {by}steps · cfg {settings.cfg_scale:g}{interval}{channels}"
    )


def latents(settings: GridSettings, run: Run, on_step: OnStep | None = None) -> Tensor:
    """Return latents (n, C, L, L) of all labels, from the settings' seed, in one process."""
    batches = ALONE.batches(len(settings.labels), settings.batch_size)
    return run.latents(settings.labels, settings.seed, batches, on_step)


def warm_up(
    settings: GridSettings, run: Run, watch: Stopwatch, placement: Placement = ALONE
) -> None:
    """Make each kind of step once where the first takes longer than others: the bar
    should not learn its pace from it.
    """
    if settings.repeats > 1 or run.device.type == "cuda" and run.network.captures:
        with watch.phase("warm-up"):
            run.warm_up(
                settings.labels, placement.batches(len(settings.labels), settings.batch_size)
            )


def sample(
    settings: GridSettings,
    run: Run,
    watch: Stopwatch,
    placement: Placement = ALONE,
    show: bool = True,
) -> list[Tensor]:
    """Return latents (n', C, L, L) of the pictures that this rank denoises, for each
    seed. Show a bar, and time `settings.repeats` runs. show: whether this process prints.
    """
    batches = placement.batches(len(settings.labels), settings.batch_size)
    steps = run.process.steps * len(batches)
    of_seeds = []
    for seed in settings.seeds:
        times = []
        for _ in range(settings.repeats):
            start = time.perf_counter()
            with watch.phase("sample"), step_bar(steps, run.device, disable=not show) as on_step:
                found = run.latents(settings.labels, seed, batches, on_step)
            times.append(time.perf_counter() - start)
        of_seeds.append(found)
        if len(times) > 1 and show:
            spread = (
                f"median {statistics.median(times):.3f} s, {min(times):.3f} to {max(times):.3f} s"
            )
            print(f"sampling, {len(times)} runs after warm-up: {spread}")
    return of_seeds


def decode(decoder: Decoder, latents: Tensor, watch: Stopwatch) -> Tensor:
    """Return pixels (n, 3, H, W) of latents (n, C, L, L), n = 0 too; time it."""
    if not len(latents):
        side = decoder.space.factor * latents.shape[-1]
        return latents.new_zeros(0, 3, side, side)
    with watch.phase("decode"):
        return decoder.decode(latents)


def save(
    settings: GridSettings,
    path: str,
    content: Tensor,
    watch: Stopwatch,
    decoder: Decoder | None = None,
) -> None:
    """Write latents, or pictures: from pixels, or by a decoder from latents. path: a
    file, or a folder for one file a picture. Every file is whole or absent. Raises
    UsageError if it cannot be written.
    """
    if settings.output_type == "latent":
        with watch.phase("save"):
            return output.save_latents(path, content)
    files = [(path, content)]
    if output.is_folder(path, settings.output_type):
        names = output.picture_names(settings.labels, settings.class_names)
        files = zip((Path(path, name) for name in names), content.split(1), strict=True)
    for file, part in files:
        pixels = decode(decoder, part, watch) if decoder else part
        with watch.phase("save"):
            output.save_pictures(file, pixels)
