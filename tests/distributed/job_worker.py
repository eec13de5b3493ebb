"""One rank of tests/distributed/test_processes.py: a job that ends as its argument says."""

import os
import signal
import sys
import time
from argparse import Namespace
from datetime import timedelta

import torch

from accel.decoders.loading import find, load
from accel.distributed import Layout, Placement, launched, process_group
from accel.errors import Stopped, UsageError
from accel.io.progress import Stopwatch
from accel.jobs.parallel import gather
from accel.pipeline import decoder_of


def exchange(ranks):
    """Prints what the ranks exchanged, on rank 0."""
    assert ranks.all_gather_object({"rank": ranks.rank}) == [
        {"rank": rank} for rank in range(ranks.world)
    ]
    assert ranks.from_rank_0(lambda: f"made on rank {ranks.rank}") == "made on rank 0"
    assert ranks.run_collectively(lambda: ranks.rank, only=1) == (1 if ranks.rank == 1 else None)
    # each once, rank 0 first
    rank, turn = ranks.run_in_turns(lambda: (ranks.rank, ranks.add(1)))
    assert rank == ranks.rank and (turn == 1) == (rank == 0) and ranks.add(0) == ranks.world
    for n, layout in ((7, Layout()), (2, Layout()), (1, Layout(rows=2))):
        placement = Placement(layout, ranks.world, ranks.rank)
        numbers = torch.arange(3 * n).view(n, 3)
        gathered = ranks.gather_pictures(numbers[placement.pictures(n)], n, placement)
        assert torch.equal(gathered, numbers)
    print("exchanged")


def turns(ranks):
    """Two nodes of two: a download is made on rank 0, then by one rank of the other node,
    then by all that are left.
    """
    first, _, second_node, _ = taken = ranks.all_gather_object(
        ranks.run_in_turns(lambda: ranks.add(1))
    )
    assert first == 1 and second_node == 2 and sorted(taken) == [1, 2, 3, 4], taken


def different(ranks):
    """A rank that is left idle has no say; those that computed are compared."""
    latents = torch.ones(2, 4)
    for busy, off in ((3, 0), (2, ranks.rank == 2), (3, ranks.rank * 1e-6)):
        placement = Placement(Layout(rows=busy), ranks.world, ranks.rank)
        ranks.local_shard(latents + off, 2, placement)


def decode(ranks):
    """Two of three ranks have a picture. The decoder of rank `failing` overflows float16, with the
    same function in float32: all decode in float32 then, else in float16.
    """
    cpu = torch.device("cpu")
    space = find(os.environ["VAE"])
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    want = decoder_of(space, cpu).decode(latents)
    placement = Placement(Layout(), ranks.world, ranks.rank)
    for failing in (None, 1):
        decoder = decoder_of(space, cpu, "fp16")
        if ranks.rank == failing:  # a norm follows
            decoder.network = load(space, cpu)
            for values in decoder.network.decoder.up_blocks[1].resnets[0].conv1.parameters():
                values.detach().mul_(1e5)
        own = latents[placement.pictures(2)]
        got = gather(Namespace(count=2), own, ranks, placement, decoder, Stopwatch(cpu))
        errors = (got - want).abs().amax((1, 2, 3))
        assert decoder.precision == ("fp16" if failing is None else "fp32")
        assert (decoder.network is None) == (ranks.rank == 2)  # idle
        # rounding alone: the factor is no power of two
        limits = (1e-9, 0.1) if failing is None else (0, 1e-4)
        assert all(limits[0] <= error <= limits[1] for error in errors), errors
    print("one arithmetic")


def complain(message):
    raise UsageError(message)


def on_one(ranks):
    """One rank fails while the others wait for what rank 0 makes."""
    ranks.run_collectively(
        lambda: complain("--ckpt x: no such file") if ranks.rank == 1 else ranks.from_rank_0(list)
    )


def on_all(ranks):
    ranks.run_collectively(lambda: complain("--vae x: no such folder"))


def on_two(ranks):
    ranks.run_collectively(lambda: ranks.rank and complain(f"--ckpt {ranks.rank}: no such file"))


def alone(ranks):
    """Without the others' knowledge, as where one node's disk is full."""
    if ranks.rank == 1:
        complain("--sample-dir: No space left on device")
    ranks.all_gather_object(None)


def crash(ranks):
    if ranks.rank == 1:
        raise ZeroDivisionError("of rank 1")
    ranks.all_gather_object(None)


def killed(ranks):
    """Kill rank 1 while the others compute. They take the launcher's SIGTERM for a
    request to stop after this batch. Ranks that torchrun starts in their place must not
    see that request.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "1" and not ranks.stopping:
        return exchange(ranks)
    ranks.stop_on_signals(signal.SIGTERM)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while not ranks.stopping:
        time.sleep(0.05)
    ranks.all_gather_object(None)


def stopped(ranks):
    """Rank 1 is asked to stop; all look between batches."""
    ranks.stop_on_signals(signal.SIGUSR1)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    while not ranks.stopping:
        time.sleep(0.05)
    raise Stopped("stopped; start again")


def stopped_on_0(ranks):
    """Rank 0 is stopped in work of its own, as in the archive."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if ranks.rank == 0:
        raise Stopped("stopped; start again")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        process_group.CONNECT_TIMEOUT = timedelta(seconds=float(sys.argv[2]))
        process_group.NOTICE_DELAY_S = 0.5
    with launched.launched_ranks("job_worker.py") as these:
        globals()[sys.argv[1]](these)
