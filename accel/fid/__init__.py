"""A folder of many pictures for FID: made by many ranks, killed at any moment, continued with the same command.

    <folder>/000000.png …           the pictures
    <folder>/.job/settings.json     what decides their bits; a start with other settings is refused
    <folder>/.job/rank-0000.jsonl   the finished batches of a rank
    <folder>/.job/lock              the job that is at work
    <folder>/.job/npz.json          what the archive's bytes are
    <folder>/.job/…                 the GEMM algorithms that the autotuner chose, on a GPU
    <folder>.npz                    arr_0 (N, H, W, 3) uint8, as the FID evaluators read it

A command makes an `Order`. Inside `locked` it loads its network and decoder, and calls `run`.
"""

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from accel.errors import Stopped, UsageError, path_errors
from accel.fid.folder import Batches, Order, npz_of
from accel.fid.journal import Journal
from accel.fid.lock import sole_job
from accel.fid.noise import Draw, PictureNoise, UpstreamNoise
from accel.fid.npz import Archive
from accel.files import cache_folder, open_regular, require_writable
from accel.latents.pixels import to_uint8
from accel.parallel.processes import Job
from accel.progress import Stopwatch


class Maker(NamedTuple):
    """What makes the pictures of a batch on this rank."""

    denoise: Callable[[torch.Tensor, torch.Tensor, Draw], torch.Tensor]  # z, labels, draw → latents, as noise.py has z
    decode: Callable[[torch.Tensor], torch.Tensor]  # latents → pixels (n, 3, H, W), about (-1, 1)
    device: torch.device
    watch: Stopwatch


@contextmanager
def locked(folder: Path, job: Job) -> Iterator[None]:
    """Make the folder and keep other jobs out of it. Load the network inside too: its autotuner writes to the folder.

    Raises UsageError on every rank if another job is at work there.
    """
    with ExitStack() as stack:
        job.run_collectively(lambda: stack.enter_context(sole_job(folder)), only=0)
        job.run_collectively(lambda: _require_access(folder), only=0)
        yield


def _require_access(folder):
    """Raise UsageError where this user may not do what `run` will, before weights are loaded."""
    for place in (folder, folder / ".job", folder.parent):
        with path_errors("sample_dir", place, "give yourself the right to write there, or use another"):
            require_writable(place)
    for place in (folder, folder / ".job"):
        with path_errors("sample_dir", place, "give yourself the right to list it, or use another"):
            os.listdir(place)
    for record in (folder / ".job").glob("rank-*.jsonl"):
        with path_errors("sample_dir", record, "give yourself the right to write it, or use another"):
            open_regular(record, os.O_RDWR | os.O_NOFOLLOW).close()


def tuner_folders(folder: Path) -> list[Path]:
    """Where the GEMM autotuner keeps what it chose, first to go by first.

    Another algorithm rounds differently. So a job that resumes, perhaps elsewhere, goes by its own choices, and a new
    one by those in the user's cache.
    """
    return [folder / ".job", cache_folder()]


def run(order: Order, job: Job, settings: dict | None, maker: Maker) -> None:
    """Make the pictures of `order` and their .npz, or what is missing of them.

    settings: all that decides the pictures' bits, plain JSON by the names that a user knows; rank 0's count. Raises
    Stopped when asked to stop, UsageError where the folder holds something else or the disk is full.
    """
    folder, batches = order.folder, Batches(order, job.rank, job.world)
    journal = Journal(folder, batches)
    try:
        job.run_collectively(lambda: journal.begin(settings), only=0)
        journal.resume(job.from_rank_0(journal.read))
        todo = batches.left(journal.record.finished)
        left = sum(job.all_gather_object(sum(len(batches.pictures(batch)) for batch in todo)))
        if left:
            todo = _make_pictures(maker, order, job, journal, todo, batches.total - left)
        unfinished, digests = zip(*job.all_gather_object((len(todo), journal.digests)))
        if any(unfinished):
            raise Stopped(f"stopped; {folder} is recorded up to here; start again with the same command to resume")
        if job.rank == 0:
            with maker.watch.phase("npz"):
                _write_npz(order, digests, lambda: job.stopping)
    except OSError as error:
        if error.errno is None:
            raise
        remedy = "free some" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "mend that"
        raise UsageError(
            f"`sample_dir`: {error.strerror} at {error.filename or folder}; {remedy} and start again with the same "
            "command to resume"
        ) from None
    print(f"{folder}: {batches.total} pictures, {npz_of(folder)}: {order.count} · {maker.watch}")


def _make_pictures(maker, order, job, journal, todo, already):
    """Make and record the batches `todo` until done or asked to stop; returns those that are left."""
    batches = journal.batches
    noise = (PictureNoise if order.independent else UpstreamNoise)(order, batches, maker.device)
    with (
        tqdm(total=batches.total, initial=already, unit="picture", smoothing=0.1, disable=job.rank > 0) as bar,
        ThreadPoolExecutor(1) as background,  # compresses and records a batch while the next is sampled
    ):
        written = background.submit(lambda: None)
        while todo and not job.stopping:
            batch, *todo = todo
            z, labels, draw = noise.batch(batch, journal.states.get(batch - batches.world))
            with maker.watch.phase("sample"):
                latents = maker.denoise(z, labels, draw)
            with maker.watch.phase("decode"):
                pixels = to_uint8(maker.decode(latents)).numpy()
            written.result()  # at most one batch waits in memory
            written = background.submit(journal.write, batch, pixels, noise.state())
            bar.update(already + job.counter("pictures", len(pixels)) - bar.n)
        written.result()
        job.barrier()
        bar.update(already + job.counter("pictures") - bar.n)
    return todo


def _write_npz(order, found, stopping):
    """Write the archive, unless it is there whole; found: the digests of pictures that each rank read or made."""
    digests = {}
    for of_a_rank in found:
        for number, some in of_a_rank.items():
            digests.setdefault(number, set()).update(some)
    archive = Archive(npz_of(order.folder), order.folder, digests, order.count, order.image_size)
    if archive.path.exists():
        problem = archive.problem()
        if problem is None:
            return
        print(f"{archive.path}: {problem}; writing it again")
    archive.write(stopping)
