"""Sample a folder of pictures for FID on any number of ranks. A job that was killed at any point
resumes with the same command.

    <folder>/000000.png …        complete pictures: a file gets its name when it is on disk
    <folder>/.job/settings.json  all settings that affect a bit; resuming with others is refused
    <folder>/.job/lock           locked by the running job
    <folder>/.job/npz.json       SHA-256 of the archive
    <folder>/.job/…              GEMM algorithms chosen by the autotuner, on a GPU
    <folder>.npz                 arr_0 (N, H, W, 3) uint8, the input of FID evaluators

job.py creates the `Plan`, loads the Pipeline within `locked`, and calls `fill`.
"""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from accel.distributed import Ranks
from accel.errors import Stopped, UsageError
from accel.io.output import to_uint8
from accel.io.progress import Stopwatch, progress
from accel.jobs.fid.folder import (
    MACHINE_SETTINGS,
    Batches,
    Plan,
    folder_lock,
    open_folder,
    write_pictures,
)
from accel.jobs.fid.noise import PictureNoise, UpstreamNoise
from accel.jobs.fid.npz import Archive
from accel.pipeline import Pipeline

log = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Create the folder and lock it. Load the network within, because its autotuner writes to the
    folder. Raises UsageError on every rank if another job runs there or permissions are missing.
    """
    with ExitStack() as stack:
        ranks.run_collectively(lambda: stack.enter_context(folder_lock(folder)), only=0)
        yield


def fill(
    plan: Plan,
    ranks: Ranks,
    settings: dict,
    pipeline: Pipeline,
    watch: Stopwatch,
    show: bool = True,
) -> None:
    """Sample the missing pictures of `plan` and write the .npz. settings: as for `open_folder`.
    show: whether to show progress.

    Raises Stopped when asked to stop; UsageError if settings differ between ranks or from the
    folder's, or if the disk is full.
    """
    ranks.require_equal(settings, MACHINE_SETTINGS)
    if plan.labels == "class_by_class" and plan.count % plan.num_classes:
        log.warning(
            f"{plan.count} pictures are not a multiple of {plan.num_classes} classes: some "
            "classes have one more"
        )
    folder = plan.folder
    batches = Batches(plan, ranks.rank, ranks.world)
    archive = Archive(folder, plan.count, plan.image_size)
    # Only rank 0 lists the folder: the views of a network file system may differ between nodes,
    # and a batch could be left out.
    finished = ranks.from_rank_0(lambda: _open_folder(batches, archive, settings))
    with disk_errors(folder):
        if len(finished) < batches.count:
            _make_pictures(pipeline, watch, plan, ranks, batches, finished, show)
        if ranks.rank == 0:
            with watch.phase("npz"):
                archive.complete(lambda: ranks.stopping)
    in_archive = "all" if plan.count == batches.total else f"the first {plan.count}"
    log.info(f"{folder}: {batches.total} pictures · {archive.path}: {in_archive} · {watch}")


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Convert OSError to UsageError with the remedy: free space and resume."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise UsageError(
            f"{error.strerror} at {error.filename or folder}",
            "fix that or free some space, and start again with the same command to resume",
            parameter="sample_dir",
        ) from None


def _open_folder(batches, archive, settings):
    """Open the folder, on rank 0. Return the finished batches."""
    with disk_errors(archive.folder):
        grown = open_folder(archive.folder, settings, batches.plan.can_grow)
        finished = batches.finished()
        if grown or len(finished) < batches.count:
            archive.forget()  # its pictures may change, for other kernels round differently
        return finished


def _make_pictures(pipeline, watch, plan, ranks, batches, finished, show):
    """Sample this rank's share of the unfinished batches. Raises Stopped if any rank was asked
    to stop.
    """
    todo = batches.to_draw(finished)
    already = sum(len(batches.pictures(batch)) for batch in finished)
    noise_type = PictureNoise if plan.independent else UpstreamNoise
    noise = noise_type(batches, pipeline.device, pipeline.process)
    with (
        progress(
            show and ranks.rank == 0, total=batches.total, initial=already, unit="picture"
        ) as bar,
        ThreadPoolExecutor(1) as background,  # writes one batch while the next is sampled
    ):
        written = background.submit(lambda: None)
        while todo and not ranks.stopping:
            batch = todo.pop(0)
            z, labels, draw = noise.batch(batch)
            if batch in finished:
                # Draw, since a CPU generator has no offset to advance.
                with watch.phase("noise"):
                    for _ in range(pipeline.process.noise_draws):
                        draw()
                continue
            with watch.phase("sample"):
                latents = pipeline.denoise(z, labels, draw)
            with watch.phase("decode"):
                pixels = to_uint8(pipeline.decode(latents), pipeline.decoder.to_uint8_range).numpy()
            written.result()  # keep at most one batch in memory
            numbers = batches.pictures(batch)
            written = background.submit(write_pictures, plan.folder, numbers, pixels)
            bar.update(already + ranks.add(len(pixels)) - bar.n)
        written.result()
        left = ranks.all_gather_object(len(todo))  # waits for all ranks
        bar.update(already + ranks.add(0) - bar.n)
    if any(left):
        raise Stopped(f"stopped; start again with the same command to resume {plan.folder}")
