"""A folder of many pictures for FID: made by many ranks, killed at any moment, continued
with the same command.

    <folder>/000000.png …        the pictures; a file under such a name is finished
    <folder>/.job/settings.json  the settings that decide their bits; a start with others is refused
    <folder>/.job/lock           the lock of the job that is running
    <folder>/.job/npz.json       a record of the archive's bytes
    <folder>/.job/…              the GEMM algorithms that the autotuner chose, on a GPU
    <folder>.npz                 arr_0 (N, H, W, 3) uint8, as the FID evaluators read it

job.py makes a `Plan`. Inside `locked` it loads its Pipeline, and calls `fill`.
"""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tqdm import tqdm

from accel.distributed import Ranks
from accel.errors import Stopped, UsageError, path_errors
from accel.io.filesystem import cache_folder, require_name, require_writable
from accel.io.output import to_uint8
from accel.io.progress import Stopwatch
from accel.jobs.fid.folder import (
    MACHINE_SETTINGS,
    Batches,
    Plan,
    npz_path,
    open_folder,
    write_pictures,
)
from accel.jobs.fid.lock import folder_lock
from accel.jobs.fid.noise import PictureNoise, UpstreamNoise
from accel.jobs.fid.npz import Archive
from accel.pipeline import Pipeline

log = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Make the folder and keep other jobs out of it. Load the network inside too: its
    autotuner writes to the folder. Raises UsageError on every rank if another job is at
    work there, or if this user may not write there.
    """
    with ExitStack() as stack:
        ranks.run_collectively(lambda: stack.enter_context(folder_lock(folder)), only=0)
        ranks.run_collectively(lambda: _require_access(folder), only=0)
        yield


def _require_access(folder):
    """Raise UsageError where this user may not write or list, before weights are loaded."""
    remedy = "give yourself the right to write there and list it, or use another"
    for place in (folder, folder / ".job", folder.parent):
        with path_errors("sample_dir", place, remedy):
            require_writable(place)
            if place != folder.parent:
                os.listdir(place)
    with path_errors("sample_dir", npz_path(folder)):
        require_name(npz_path(folder))


def tuner_folders(folder: Path) -> list[Path]:
    """Return the folders of the GEMM autotuner's choices: the job's own, since another
    algorithm rounds differently, then the user's cache.
    """
    return [folder / ".job", cache_folder()]


def fill(plan: Plan, ranks: Ranks, settings: dict, pipeline: Pipeline, watch: Stopwatch) -> None:
    """Make the missing pictures of `plan` and their .npz. settings: as for `open_folder`.

    Raises Stopped when asked to stop, UsageError where ranks differ in settings, the folder
    holds something else or the disk is full.
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
    # Rank 0's view for all: each node has its own, older view of a network file system,
    # and ranks with different views would leave batches to each other.
    finished = ranks.from_rank_0(lambda: _open_folder(batches, archive, settings))
    with disk_errors(folder):
        if len(finished) < batches.count:
            _make_pictures(pipeline, watch, plan, ranks, batches, finished)
        if ranks.rank == 0:
            with watch.phase("npz"):
                archive.complete(lambda: ranks.stopping)
    in_archive = "all" if plan.count == batches.total else f"the first {plan.count}"
    log.info(f"{folder}: {batches.total} pictures · {archive.path}: {in_archive} · {watch}")


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError of the block into a UsageError that says how to resume."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise UsageError(
            f"{error.strerror} at {error.filename or folder}",
            "mend that or free some space, and start again with the same command to resume",
            parameter="sample_dir",
        ) from None


def _open_folder(batches, archive, settings):
    """Open the folder on rank 0. Return the finished batches."""
    with disk_errors(archive.folder):
        grown = open_folder(archive.folder, settings, batches.plan.can_grow)
        finished = batches.finished()
        if grown or len(finished) < batches.count:
            archive.forget()  # it may be of other pictures: other kernels round otherwise
        return finished


def _make_pictures(pipeline, watch, plan, ranks, batches, finished):
    """Make this rank's share of the batches that are not finished. Raises Stopped if any
    rank was asked to stop.
    """
    todo = batches.to_draw(finished)
    already = sum(len(batches.pictures(batch)) for batch in finished)
    noise_type = PictureNoise if plan.independent else UpstreamNoise
    noise = noise_type(plan, batches, pipeline.device, pipeline.process)
    with (
        tqdm(
            total=batches.total,
            initial=already,
            unit="picture",
            smoothing=0.1,
            disable=ranks.rank > 0,
        ) as bar,
        ThreadPoolExecutor(1) as background,  # writes a batch while the next is sampled
    ):
        written = background.submit(lambda: None)
        while todo and not ranks.stopping:
            batch = todo.pop(0)
            z, labels, draw = noise.batch(batch)
            if batch in finished:
                # A CUDA generator's offset could be advanced, a CPU's not.
                with watch.phase("noise"):
                    for _ in range(pipeline.process.noise_draws):
                        draw()
                continue
            with watch.phase("sample"):
                latents = pipeline.denoise(z, labels, draw)
            with watch.phase("decode"):
                pixels = to_uint8(pipeline.decode(latents), pipeline.decoder.to_uint8_range).numpy()
            written.result()  # at most one batch waits in memory
            numbers = batches.pictures(batch)
            written = background.submit(write_pictures, plan.folder, numbers, pixels)
            bar.update(already + ranks.add(len(pixels)) - bar.n)
        written.result()
        left = ranks.all_gather_object(len(todo))  # waits for all ranks
        bar.update(already + ranks.add(0) - bar.n)
    if any(left):
        raise Stopped(f"stopped; start again with the same command to resume {plan.folder}")
