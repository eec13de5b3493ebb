"""Sample a grid of pictures on one or several ranks, from options to files.

Each rank samples some of the labels or, if there are fewer labels than ranks, computes a part of
each network evaluation (--parallel). All ranks draw the same random stream.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

from torch import Tensor

import accel
from accel import launch
from accel.config.options import USER
from accel.config.repeated import FILE_OPTIONS, REPEATED
from accel.config.rules import Request
from accel.decoders.decoder import Decoder
from accel.decoders.loading import digest
from accel.distributed import OFF, Ranks
from accel.errors import STOPPED, UsageError, shown, warn
from accel.io import output
from accel.io.progress import Stopwatch, step_bar
from accel.pipeline import Generators, Pipeline, free_memory
from accel.run import Run
from accel.run.opening import open_on_ranks

log = logging.getLogger(__name__)


def make_grid(request: Request, ranks: Ranks) -> None:
    """Open the request, load, warm up, sample, decode, gather and save. Only rank 0 writes."""
    run, watch = open_on_ranks(request, ranks)
    if request.repeated.given.name:
        ranks.run_collectively(lambda: require_same(run), only=0)
    if ranks.world > 1 or run.layout not in (None, OFF):
        from accel.jobs import parallel  # lazy: imports torch.distributed

        pipeline = parallel.load(run, ranks, watch)
    else:
        with watch.phase("load"):
            pipeline = Pipeline.load(run)
        log.info(run.describe(pipeline.machine))

    machine = machine_of(run, pipeline, ranks.world)
    digests: dict[str, str] = {}
    # Next to sampling: reading all weights takes seconds, and hashlib releases the lock.
    hashing = Thread(target=lambda: digests.update(digests_of(run)), daemon=True)
    if ranks.rank == 0 and run.space.decoder is not None:
        hashing.start()
    warm_up(run, pipeline, watch)
    placement = pipeline.placement
    decoder = pipeline.decoder
    if decoder is not None and run.device.type == "cuda":
        decoder.load_ahead()
    latents_of_seeds = sample(run, pipeline, watch, ranks.rank == 0 and not run.settings.quiet)
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
            made_by = record_of(run, tier, machine, digests, number)
            files += save(run, path, content, watch, None if ranks.world > 1 else decoder, made_by)
    if ranks.rank == 0:
        since_start = time.perf_counter() - launch.START_TIME
        log.info(f"{', '.join(outputs)}: {watch} · {since_start:.2f} s since start")
        run.repeat_assumed_family()
        if run.settings.json:
            settings = replace(run.settings, precision=tier)
            seconds = {**watch.phases, "since_start": since_start}
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
        with watch.phase("sample"), step_bar(steps, pipeline.device, show) as on_step:
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


# ---- The settings in a picture's file, and the check of a run that repeats them (--like) ----


def digests_of(run: Run) -> dict[str, str]:
    """Return the digests of weights, guide and decoder, by option. They are cached. A file that
    was changed since it was opened has none, with a notice.
    """
    compute: dict[str, Callable[[], str]] = {"ckpt": run.checkpoint.digest}
    if run.guide is not None:
        compute["guide"] = run.guide.digest
    if run.space.decoder is not None:
        compute["vae"] = lambda: digest(run.space)
    digests = {}
    for name, digest_of in compute.items():
        try:
            digests[name] = digest_of()
        except UsageError as error:
            warn(f"the picture's settings lack the digest of a file; {error.marked}")
    return digests


def record_of(
    run: Run, tier: str, machine: list[str], digests: Mapping[str, str], number: int
) -> dict[str, Any]:
    """Return the settings that the file of a grid contains, as JSON data. Files appear by name
    only. tier: of the network. machine: by `machine_of`. digests: by `digests_of`. number: of the
    grid in the run.
    """
    given = run.request.values
    listed = run.settings.seed_list
    seed = listed[number] if listed else run.settings.seed
    settings = replace(run.settings, precision=tier, seed=seed).as_json()
    names = REPEATED & settings.keys()
    for name in ("model", "num_classes"):  # follow from the weights
        if settings[name]["origin"] != USER and (name == "num_classes" or "ckpt" in given):
            names.discard(name)
    paths = {name: getattr(run.settings, name) for name in FILE_OPTIONS}
    return {
        "machine": machine,
        "settings": {
            name: {**settings[name], "origin": Path(settings[name]["origin"]).name}
            for name in sorted(names)
        },
        "files": {
            name: {
                "name": path and Path(path).name,
                "given": name in given,
                "digest": digests.get(name),
            }
            for name, path in paths.items()
        },
        "grid": 0 if listed else run.request.repeated.grid + number,
    }


def machine_of(run: Run, pipeline: Pipeline, ranks: int) -> list[str]:
    """Return all that can change a picture's rounding, as text. Print a notice if the repeated
    picture was made by another version, torch, GPU or number of ranks.
    """
    world = f"{ranks} rank{'s' * (ranks > 1)}"
    machine = [f"version {accel.__version__}", *pipeline.machine[1:], world]
    repeated = run.request.repeated
    if repeated.machine not in ((), tuple(machine)):
        made = ", ".join(shown(each) for each in repeated.machine)
        repeated.given.warn(f"was made by {made}; pixels can differ in rounding here")
    return machine


def require_same(run: Run) -> None:
    """Compare the files' digests with the repeated picture's. Raises UsageError if the weights or
    the guide differ; prints a notice if the decoder differs.
    """
    repeated = run.request.repeated
    for name, own in {"ckpt": None, **digests_of(run)}.items():
        recorded = repeated.digests.get(name)
        if own == recorded is not None or recorded is None and name != "ckpt":
            continue
        text = f"was made with another `{name}` (digest {shown(str(recorded))}, not {own})"
        if name != "vae":
            raise repeated.given.error(text, "give the same")
        repeated.given.warn(text)
