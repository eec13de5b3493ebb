"""A grid of pictures, from its options to its files: by one process, or by the ranks of a
job.

Each rank makes the pictures of some labels or, if there are fewer labels than ranks, a part
of every network evaluation (--parallel). All ranks draw the same random stream.
"""

import logging
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel import launch, output
from accel.config import Grid, Job
from accel.errors import STOPPED, UsageError
from accel.latents.decoder import Decoder
from accel.network import divides_tokens, stages_of
from accel.opening import Opened, open_model, open_on_ranks
from accel.pipeline import ALONE, Pipeline, free_memory
from accel.progress import Stopwatch, step_bar
from accel.ranks import Ranks
from accel.ranks.layouts import OFF, Layout, Placement
from accel.sampling import count_copies
from accel.weights import Weights

log = logging.getLogger(__name__)


class Placed(NamedTuple):
    """A pipeline whose network is the one that this rank evaluates, and this rank's
    placement.
    """

    pipeline: Pipeline
    placement: Placement


class Ready(NamedTuple):
    """A grid with every option filled, its files, and the pipeline that makes it."""

    grid: Grid
    opened: Opened
    pipeline: Pipeline


def ready(
    grid: Grid,
    weights: Weights | None = None,
    scheduler: Any = None,
    guide: Weights | None = None,
) -> Ready:
    """Open and load a grid in this process.

    weights, guide: in place of those that it names. scheduler: one of diffusers, in place of
    its sampler.
    """
    decodes = grid.output_type == "image"
    opened = open_model(grid.config, weights=weights, decodes=decodes, guide=guide)
    grid = grid.filled(opened.config, opened.fit, opened.has_null_label)
    return Ready(grid, opened, load(grid, opened, scheduler))


def load(grid: Grid, opened: Opened, scheduler: Any = None) -> Pipeline:
    """Load the pipeline of a grid in this process. scheduler: as for `ready`."""
    sizes = ALONE.sizes(len(grid.labels), grid.batch_size)
    return Pipeline.load(opened, sizes, scheduler=scheduler, too_large=grid.too_large)


def batches_of(grid: Grid) -> list[slice]:
    """Return the slices of the labels that a process by itself denoises at once."""
    return ALONE.batches(len(grid.labels), grid.batch_size)


def make_grid(grid: Grid, ranks: Ranks) -> None:
    """Make the pictures of a grid: open, load, place, warm up, sample, decode, gather, save.
    Rank 0 writes and prints.
    """
    decodes = grid.output_type == "image"
    divided = grid.layout is not None and grid.layout.weights > 1
    opened, watch = open_on_ranks(grid.config, ranks, decodes, divided)
    grid = grid.filled(opened.config, opened.fit, opened.has_null_label)
    pipeline, placement = load_and_place(grid, opened, ranks, watch)

    batches = placement.batches(len(grid.labels), grid.batch_size)
    warm_up(grid, pipeline, batches, watch)
    decoder = pipeline.decoder
    if decoder is not None:
        decoder.load_ahead()
    latents_of_seeds = sample(grid, pipeline, batches, watch, show=ranks.rank == 0)
    del pipeline
    free_memory(opened.device)

    if ranks.rank == 0:
        _exit_by_exception(signal.SIGTERM)
    for path, latents in zip(grid.outputs, latents_of_seeds, strict=True):
        finish(grid, path, latents, ranks, placement, decoder, watch)
    if ranks.rank == 0:
        log.info(f"{', '.join(grid.outputs)}: {watch} · {launch.seconds():.2f} s since start")


def load_and_place(grid: Grid, opened: Opened, ranks: Ranks, watch: Stopwatch) -> Placed:
    """Load the network on every rank and divide the pictures, or each network evaluation,
    among the ranks.
    """
    layout = ranks.run_collectively(lambda: choose_layout(grid, opened, ranks))
    ranks.open_collectives()
    tuner = None
    if ranks.world > 1:
        from accel.kernels.linear import Tuner  # a process by itself may need none

        tuner = Tuner(share=ranks.from_rank_0)
    expected = ranks.placement(layout or OFF)
    with watch.phase("load"):
        part = ranks.part(layout)
        pipeline = ranks.run_collectively(
            lambda: Pipeline.load(
                opened,
                expected.sizes(len(grid.labels), grid.batch_size),
                placement=expected,
                part=part,
                tuner=tuner,
                too_large=grid.too_large,
            )
        )
    log.info(describe(grid, pipeline, ranks.world))
    if ranks.world == 1:
        return Placed(pipeline, expected)
    with watch.phase("plan"):
        return share_evaluations(grid, opened, pipeline, ranks, layout)


def describe(job: Job, pipeline: Pipeline, ranks: int = 1) -> str:
    """Return the line that announces a job. ranks: their number."""
    config = job.config
    words = [
        config.model,
        f"{config.image_size} px",
        job.pictures,
        config.steps_and_guidance(),
        pipeline.tier,
        hardware(pipeline.device),
        f"torch {torch.__version__}",
    ]
    if ranks > 1:
        words.append(f"{ranks} ranks")
    return " · ".join(words)


def hardware(device: torch.device) -> str:
    """Return the GPU's name, or the CPU's number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def choose_layout(grid: Grid, opened: Opened, ranks: Ranks) -> Layout | None:
    """Return a grid's layout, None to measure it. Raises UsageError if it cannot run."""
    layout = grid.layout
    if layout is None:
        # With a picture for every GPU there is nothing to share.
        return OFF if len(grid.labels) >= ranks.world else None
    if layout != OFF:
        from accel.ranks import planner  # brings torch.distributed

        planner.check(layout, opened.tokens, opened.fit.num_heads, ranks)
        stages = stages_of(opened.fit.empty(opened.latent_size))
        if layout.tokens > 1 and not divides_tokens(stages):
            raise UsageError(
                f"`parallel={layout}`: tokens are not divided where label tokens stand before "
                "them; take rows=N or weights=N"
            )
    return layout


def share_evaluations(
    grid: Grid, opened: Opened, pipeline: Pipeline, ranks: Ranks, layout: Layout | None
) -> Placed:
    """Share the network evaluations by a layout, None to measure one."""
    from accel.ranks import planner  # brings torch.distributed

    work = planner.Work(
        pictures=len(grid.labels),
        at_once=grid.batch_size,
        copies=count_copies(pipeline.process, pipeline.guidance),
        tokens=opened.tokens,
        tier=pipeline.tier,
    )
    network, placement = planner.share_evaluations(pipeline.network, work, ranks, layout)
    return Placed(pipeline.with_(network=network), placement)


def warm_up(grid: Grid, pipeline: Pipeline, batches: list[slice], watch: Stopwatch) -> None:
    """Make each kind of step once where the first takes longer than others: the bar should
    not learn its pace from it.
    """
    captures = pipeline.device.type == "cuda" and pipeline.network.captures
    if grid.repeats > 1 or captures:
        with watch.phase("warm-up"):
            pipeline.warm_up(grid.labels, batches)


def sample(
    grid: Grid, pipeline: Pipeline, batches: list[slice], watch: Stopwatch, show: bool = True
) -> list[Tensor]:
    """Return latents (n', C, L, L) of the slices `batches` of the labels, for each seed. Show
    a bar, and time `grid.repeats` runs. show: whether this process prints.
    """
    steps = pipeline.process.steps * len(batches)
    latents_of_seeds = []
    for seed in grid.seeds:
        times = []
        for _ in range(grid.repeats):
            start = time.perf_counter()
            bar = step_bar(steps, pipeline.device, disable=not show)
            with watch.phase("sample"), bar as on_step:
                latents = pipeline.latents(grid.labels, seed, batches, on_step)
            times.append(time.perf_counter() - start)
        latents_of_seeds.append(latents)
        if len(times) > 1 and show:
            median = statistics.median(times)
            log.info(
                f"sampling, {len(times)} runs after warm-up: median {median:.3f} s, "
                f"{min(times):.3f} to {max(times):.3f} s"
            )
    return latents_of_seeds


def finish(
    grid: Grid,
    path: str,
    latents: Tensor,
    ranks: Ranks,
    placement: Placement,
    decoder: Decoder | None,
    watch: Stopwatch,
) -> None:
    """Decode the latents of one seed, each rank its own pictures, gather and write them.

    A process by itself decodes one file after the other: a folder of many pictures needs the
    memory of one.
    """
    if ranks.world == 1:
        save(grid, path, latents, watch, decoder)
        return
    n = len(grid.labels)
    pictures = ranks.own_pictures(latents, n, placement)
    if decoder is not None:
        with watch.phase("decode"):
            pictures = decoder.decode(pictures)
    with watch.phase("gather"):
        gathered = ranks.gather_pictures(pictures, n, placement)
    if ranks.rank == 0:
        save(grid, path, gathered, watch)


def save(
    grid: Grid,
    path: str,
    content: Tensor,
    watch: Stopwatch,
    decoder: Decoder | None = None,
) -> None:
    """Write latents, or pictures: from pixels, or by a decoder from latents.

    path: a file, or a folder for one file a picture. Every file is whole or absent. Raises
    UsageError if it cannot be written.
    """
    if grid.output_type == "latent":
        with watch.phase("save"):
            output.save_latents(path, content)
        return
    files = [(path, content)]
    if output.is_folder(path, grid.output_type):
        names = output.picture_names(grid.labels, grid.class_names)
        files = zip((Path(path, name) for name in names), content.split(1), strict=True)
    for file, part in files:
        pixels = part
        if decoder is not None:
            with watch.phase("decode"):
                pixels = decoder.decode(part)
        with watch.phase("save"):
            output.save_pictures(file, pixels)


def _exit_by_exception(number):
    """Exit by SystemExit on a signal that would kill: a file that is being written is
    removed.
    """
    if signal.getsignal(number) is signal.SIG_DFL:
        signal.signal(number, lambda *_: sys.exit(STOPPED))
