"""One rank of tests/distributed/test_processes.py: a job that ends as its argument says."""

import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial

import torch

from accel.errors import Stopped, UsageError
from accel.parallel import processes
from accel.parallel.layouts import Layout
from accel.parallel.placement import Placement


def exchange(job):
    """Prints what the ranks exchanged, on rank 0."""
    assert job.all_gather_object({"rank": job.rank}) == [
        {"rank": rank} for rank in range(job.world)
    ]
    assert job.from_rank_0(lambda: f"made on rank {job.rank}") == "made on rank 0"
    assert job.run_collectively(lambda: job.rank, only=1) == (1 if job.rank == 1 else None)
    # each once, rank 0 first
    rank, turn = job.run_in_turns(lambda: (job.rank, job.store.add("turns", 1)))
    assert (
        rank == job.rank and (turn == 1) == (rank == 0) and job.store.add("turns", 0) == job.world
    )
    assert job.max_over_ranks([job.rank, -job.rank]) == [job.world - 1, 0]
    for n, layout in ((7, Layout()), (2, Layout()), (1, Layout(rows=2))):
        placement = Placement(layout, job.world, job.rank)
        numbers = torch.arange(3 * n).view(n, 3)
        gathered = placement.gather(job, numbers[placement.pictures(n)], n)
        assert torch.equal(gathered, numbers) if job.rank == 0 else gathered is None
    print("exchanged")


def turns(job):
    """Two nodes of two: a download is made on rank 0, then by one rank of the other node,
    then by all that are left.
    """
    first, _, second_node, _ = taken = job.all_gather_object(
        job.run_in_turns(lambda: job.store.add("turns", 1))
    )
    assert first == 1 and second_node == 2 and sorted(taken) == [1, 2, 3, 4], taken


def different(job):
    """A rank that is left idle has no say; those that computed are compared."""
    latents = torch.ones(2, 4)
    for ranks, off in ((3, 0), (2, job.rank == 2), (3, job.rank * 1e-6)):
        Placement(Layout(rows=ranks), 3, job.rank).own(job, latents + off, 2)


def complain(message):
    raise UsageError(message)


def on_one(job):
    """One rank fails while the others wait for what rank 0 makes."""
    job.run_collectively(
        lambda: complain("--ckpt x: no such file") if job.rank == 1 else job.from_rank_0(list)
    )


def on_all(job):
    job.run_collectively(lambda: complain("--vae x: no such folder"))


def on_two(job):
    job.run_collectively(lambda: job.rank and complain(f"--ckpt {job.rank}: no such file"))


def alone(job):
    """Without the others' knowledge, as where one node's disk is full."""
    if job.rank == 1:
        complain("--sample-dir: No space left on device")
    job.barrier()


def crash(job, rank=1):
    if job.rank == rank:
        raise ZeroDivisionError(f"of rank {rank}")
    job.barrier()


crash_on_0 = partial(crash, rank=0)


def killed(job):
    """Kill rank 1 while the others compute. They take the launcher's SIGTERM for a
    request to stop after this batch. Ranks that torchrun starts in their place must not
    see that request.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "1" and not job.stopping:
        return exchange(job)
    job.stop_on_signals(signal.SIGTERM)
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while not job.stopping:
        time.sleep(0.05)
    job.barrier()


def killed_in_wait(job):
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    job.barrier()


def stopped(job):
    """Rank 1 is asked to stop; all look between batches."""
    job.stop_on_signals(signal.SIGUSR1)
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    while not job.stopping:
        time.sleep(0.05)
    raise Stopped("stopped; start again")


def stopped_on_0(job):
    """As in the archive, which rank 0 writes by itself."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if job.rank == 0:
        raise Stopped("stopped; start again")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        processes.START = timedelta(seconds=float(sys.argv[2]))
    with processes.launched_job("job_worker.py") as this_job:
        globals()[sys.argv[1]](this_job)
