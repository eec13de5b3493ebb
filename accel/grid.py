"""A grid of pictures, from its options to its files: by one process, or by the ranks of a
job.

Each rank makes the pictures of some labels or, if there are fewer labels than ranks, a part
of every network evaluation (--parallel). All ranks draw the same random stream.
"""

import logging
import signal
import sys
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from accel import launch, output
from accel.config import Grid
from accel.errors import STOPPED
from accel.latents.decoder import Decoder
from accel.opening import Opened, open_model, open_on_ranks
from accel.pipeline import ALONE, Pipeline, free_memory
from accel.progress import Stopwatch, step_bar
from accel.ranks import Ranks
from accel.ranks.placement import OFF
from accel.weights import Weights

log = logging.getLogger(__name__)


class Ready(NamedTuple):
    """A grid with every option filled, its files, and the pipeline that makes it."""

    grid: Grid
    opened: Opened
    pipeline: Pipeline


def ready(grid: Grid, weights: Weights | None = None, guide: Weights | None = None) -> Ready:
    """Open and load a grid in this process. weights, guide: in place of those that it names."""
    decodes = grid.output_type == "image"
    opened = open_model(grid.config, weights=weights, decodes=decodes, guide=guide)
    grid = grid.filled(opened.config, opened.fit, opened.has_null_label)
    return Ready(grid, opened, load(grid, opened, any_scale=True))


def load(grid: Grid, opened: Opened, any_scale: bool = False) -> Pipeline:
    """Load the pipeline of a grid in this process. any_scale: as for Pipeline.load."""
    sizes = ALONE.sizes(grid.count, grid.batch_size)
    return Pipeline.load(opened, sizes, any_scale=any_scale, too_large=grid.too_large)


def batches_of(grid: Grid) -> list[slice]:
    """Return the slices of the labels that a process by itself denoises at once."""
    return ALONE.batches(grid.count, grid.batch_size)


def make_grid(grid: Grid, ranks: Ranks) -> None:
    """Make the pictures of a grid: open, load, place, warm up, sample, decode, gather, save.
    Rank 0 writes and prints.
    """
    decodes = grid.output_type == "image"
    opened, watch = open_on_ranks(grid.config, ranks, decodes)
    grid = grid.filled(opened.config, opened.fit, opened.has_null_label)
    if ranks.world > 1 or grid.layout not in (None, OFF):
        from accel import parallel  # brings torch.distributed

        pipeline = parallel.load(grid, opened, ranks, watch)
    else:
        with watch.phase("load"):
            pipeline = load(grid, opened)
        log.info(grid.describe(pipeline.machine))

    placement = pipeline.placement
    batches = placement.batches(grid.count, grid.batch_size)
    warm_up(grid, pipeline, batches, watch)
    decoder = pipeline.decoder
    if decoder is not None:
        decoder.load_ahead()
    latents_of_seeds = sample(grid, pipeline, batches, watch, show=ranks.rank == 0)
    del pipeline
    free_memory(opened.device)

    if ranks.rank == 0 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))  # removes a partial file
    for path, latents in zip(grid.outputs, latents_of_seeds, strict=True):
        if ranks.world == 1:  # decodes file after file: a folder needs the memory of a picture
            save(grid, path, latents, watch, decoder)
            continue
        pictures = parallel.gather(grid, latents, ranks, placement, decoder, watch)
        if ranks.rank == 0:
            save(grid, path, pictures, watch)
    if ranks.rank == 0:
        log.info(f"{', '.join(grid.outputs)}: {watch} · {launch.seconds():.2f} s since start")


def warm_up(grid: Grid, pipeline: Pipeline, batches: list[slice], watch: Stopwatch) -> None:
    """Make each kind of step once where the first takes longer than others: the bar should
    not learn its pace from it.
    """
    if pipeline.device.type == "cuda" and pipeline.network.captures:
        with watch.phase("warm-up"):
            pipeline.warm_up(grid.labels, batches)


def sample(
    grid: Grid, pipeline: Pipeline, batches: list[slice], watch: Stopwatch, show: bool = True
) -> list[Tensor]:
    """Return latents (n', C, L, L) of the slices `batches` of the labels, for each seed. Show
    a bar if this process prints.
    """
    steps = pipeline.process.steps * len(batches)
    latents_of_seeds = []
    for seed in grid.seeds:
        bar = step_bar(steps, pipeline.device, disable=not show)
        with watch.phase("sample"), bar as on_step:
            latents_of_seeds.append(pipeline.latents(grid.labels, seed, batches, on_step))
    return latents_of_seeds


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
