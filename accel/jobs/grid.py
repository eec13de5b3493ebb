"""Sample a grid of pictures on one or several ranks, from options to files.

Each rank samples some of the labels or, if there are fewer labels than ranks, computes a part of
each network evaluation (--parallel). All ranks draw the same random stream.
"""

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Thread
from typing import Any

from torch import Tensor

from accel import launch
from accel.config.rules import Request
from accel.decoders.decoder import Decoder
from accel.distributed import OFF, Ranks
from accel.errors import STOPPED
from accel.io import output
from accel.io.progress import Stopwatch, step_bar
from accel.jobs import record
from accel.pipeline import Generators, Pipeline, free_memory
from accel.run import Run
from accel.run.opening import open_on_ranks

log = logging.getLogger(__name__)


def make_grid(request: Request, ranks: Ranks) -> None:
    """Open the request, load, warm up, sample, decode, gather and save. Only rank 0 writes."""
    run, watch = open_on_ranks(request, ranks)
    if request.repeated.given.name:
        ranks.run_collectively(lambda: record.require_same(run), only=0)
    if ranks.world > 1 or run.layout not in (None, OFF):
        from accel.jobs import parallel  # lazy: imports torch.distributed

        pipeline = parallel.load(run, ranks, watch)
    else:
        with watch.phase("load"):
            pipeline = Pipeline.load(run)
        log.info(run.describe(pipeline.machine))

    machine = record.machine_of(run, pipeline, ranks.world)
    digests: dict[str, str] = {}
    # Next to sampling: reading all weights takes seconds, and hashlib releases the lock.
    hashing = Thread(target=lambda: digests.update(record.digests_of(run)), daemon=True)
    if ranks.rank == 0 and run.space.decoder is not None:
        hashing.start()
    warm_up(run, pipeline, watch)
    placement = pipeline.placement
    decoder = pipeline.decoder
    if decoder is not None:
        decoder.load_ahead()
    show = ranks.rank == 0 and not run.settings.quiet
    latents_of_seeds = sample(run, pipeline, watch, show)
    tier = pipeline.tier
    del pipeline
    free_memory(run.device)

    if ranks.rank == 0 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))  # removes partial files
    if hashing.is_alive():
        with watch.phase("digest"):
            hashing.join()
    outputs = output.outputs_of(request.values)
    files = []
    for number, (path, content) in enumerate(zip(outputs, latents_of_seeds, strict=True)):
        if ranks.world > 1:
            content = parallel.gather(run, content, ranks, placement, decoder, watch)
        if ranks.rank == 0:
            # save decodes file by file, in the memory of one picture
            made_by = record.record_of(run, tier, machine, digests, number)
            files += save(run, path, content, watch, None if ranks.world > 1 else decoder, made_by)
    if ranks.rank == 0:
        log.info(
            f"{', '.join(outputs)}: {watch} · {launch.seconds_since_start():.2f} s since start"
        )
        run.repeat_assumed_family()
        if run.settings.json:
            seconds = {**watch.phases, "since_start": launch.seconds_since_start()}
            settings = replace(run.settings, precision=tier)
            output.print_result(files, seconds, settings.as_json())


def warm_up(run: Run, pipeline: Pipeline, watch: Stopwatch) -> None:
    """Run each kind of step once if the first run captures a graph: the progress bar would
    extrapolate from it.
    """
    if pipeline.device.type == "cuda" and pipeline.network.captures:
        with watch.phase("warm-up"):
            pipeline.warm_up(run.settings.labels)


def sample(run: Run, pipeline: Pipeline, watch: Stopwatch, show: bool) -> list[Tensor]:
    """Sample this rank's latents (n', C, L, L) of each grid. show: a progress bar."""
    steps = pipeline.process.steps * len(pipeline.batches(run.count))
    latents_of_seeds = []
    seeds: Sequence[int | Generators] = run.settings.seed_list or [run.settings.seed]
    skipped = run.request.repeated.grid
    if run.settings.grids > 1 or skipped:
        generators = pipeline.generators(run.settings.seed)
        for _ in range(skipped):
            pipeline.skip(run.settings.labels, generators)
        # the same generators, so that a grid continues the one before
        seeds = [generators] * run.settings.grids
    for seed in seeds:
        bar = step_bar(steps, pipeline.device, show)
        with watch.phase("sample"), bar as on_step:
            latents_of_seeds.append(pipeline.latents(run.settings.labels, seed, on_step))
    return latents_of_seeds


def save(
    run: Run,
    path: str,
    content: Tensor,
    watch: Stopwatch,
    decoder: Decoder | None = None,
    made_by: Mapping[str, Any] | None = None,
) -> list[str]:
    """Write latents or pictures and return the files. content: latents, or pixels if `decoder` is
    None. made_by: the settings to write into PNGs.

    path: a file, or a folder with one file per picture. Each file is complete or absent. If a
    single picture is repeated, only it is written. Raises UsageError if writing fails.
    """
    only = run.request.repeated.picture
    if only is not None:
        content = content[only : only + 1]
    if run.settings.output_type == "latent":
        with watch.phase("save"):
            output.save_latents(path, content)
        return [path]
    files = [path]
    parts = [content]
    numbers: Sequence[Any] = [only]
    if output.is_folder(path, run.settings.output_type):
        names = output.picture_names(run.settings.labels, run.settings.class_names)
        numbers = range(run.count) if only is None else [only]
        files = [os.path.join(path, names[number]) for number in numbers]
        parts = list(content.split(1))
    for file, part, number in zip(files, parts, numbers, strict=True):
        pixels = part
        if decoder is not None:
            with watch.phase("decode"):
                pixels = decoder.decode(part)
        with watch.phase("save"):
            place = {} if number is None else {"label": run.settings.labels[number]}
            output.save_pictures(file, pixels, made_by and {**made_by, "picture": number, **place})
    return files
