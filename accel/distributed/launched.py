"""Join the distributed job that torchrun, srun or --gpus started, and end all ranks together.

The launcher starts one process per GPU and kills all of them when one dies.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from accel import launch
from accel.distributed import Ranks
from accel.errors import (
    STOPPED,
    USAGE,
    Stopped,
    UsageError,
    as_usage_error,
    record,
)


def set_address() -> None:
    """Set MASTER_ADDR and MASTER_PORT under srun: the first host of the step, and a port derived
    from the job and step ids. Raises UsageError without Slurm's commands.
    """
    if "SLURM_STEP_ID" in os.environ and "MASTER_PORT" not in os.environ:
        job = int(os.environ["SLURM_JOB_ID"])
        step = int(os.environ["SLURM_STEP_ID"])
        os.environ["MASTER_PORT"] = str(12000 + (job * 16 + step % 16) % 20000)
    if "MASTER_ADDR" in os.environ:
        return
    command = ["scontrol", "show", "hostnames", os.environ.get("SLURM_STEP_NODELIST", "")]
    try:
        hosts = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(
            f"srun: scontrol names no hosts ({error}); export MASTER_ADDR, the first of them"
        ) from None
    os.environ["MASTER_ADDR"] = hosts.split()[0]


def _join():
    """Connect to the other ranks that torchrun or srun started, if any. Raises UsageError if a rank
    is missing.
    """
    if "RANK" in os.environ:
        names = "RANK", "WORLD_SIZE", "LOCAL_RANK"
    elif launch.is_task_of_srun():  # the batch script itself has no step
        names = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"
    else:
        return Ranks()
    rank, world, local_rank = (int(os.environ.get(name, 0)) for name in names)
    if world < 2:
        return Ranks()
    from accel.distributed.process_group import connect  # lazy: imports torch.distributed

    set_address()
    # Hide the lines that gloo prints, and the output of all ranks but 0.
    printed = os.dup(1) if rank == 0 else os.open(os.devnull, os.O_WRONLY)
    coding = dict(encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    sys.stdout = os.fdopen(printed, "w", buffering=1, **coding)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return connect(rank, world, local_rank)


@contextmanager
def launched_ranks(program: str, worded: Callable[[UsageError], str] = str) -> Iterator[Ranks]:
    """Run the block as one rank of its job. If one rank fails, all ranks exit and the cause is
    printed once. worded: formats a UsageError.

    Exit statuses: USAGE after UsageError and STOPPED after Stopped, both with one line; 1 with
    a traceback after any other exception.
    """
    try:
        ranks = _join()
    except UsageError as error:
        # All ranks of srun fail alike.
        if "SLURM_STEP_ID" not in os.environ or os.environ["SLURM_PROCID"] == "0":
            print(f"{program}: {worded(error)}", file=sys.stderr)
            record(f"{program}: {worded(error)}")
        _exit(USAGE)
    status = 0
    try:
        try:
            yield ranks
        except Stopped as stopped:
            status = STOPPED
            line = f"{program}: {stopped}"
            record(line)  # on every rank: torchrun reports the first process that exits
            if ranks.rank == 0:
                print(line, file=sys.stderr)
        ranks.leave()
    except BaseException as error:
        _fail(ranks, program, error, worded)
    if status or ranks.world > 1:
        _exit(status)


def _fail(ranks, program, error, worded) -> NoReturn:
    """Exit after `error`. The first rank that fails prints the cause and exits first, so that
    torchrun reports it as the root cause; all other ranks exit later with the same status.
    """
    if isinstance(error, SystemExit):  # after a signal
        ranks.first_failure(error.code)
        _exit(error.code)
    if launch.IS_GPUS_RANK:
        # If another rank was killed, the parent reports that and kills this rank first.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(0.2)
        if sys.stderr.isatty():
            print(end="\r\033[K", file=sys.stderr)  # rank 0's bar
    else:
        # The launcher sends SIGTERM when the first rank exits.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mistake = as_usage_error(error)
    first_rank, status = ranks.first_failure(USAGE if mistake else 1)
    is_first = first_rank == ranks.rank
    endings = dict(launch.ENDINGS.values())
    text = ""
    if is_first and mistake:
        text = "\n".join(f"{program}: {line}" for line in worded(mistake).splitlines())
    elif is_first:
        text = f"rank {ranks.rank} of {ranks.world} on {socket.gethostname()}:\n"
        text += traceback.format_exc()
    elif status in endings and ranks.rank == 0:
        text = f"{program}: rank {first_rank}: {endings[status]}"
    elif status == 1:
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        text = f"rank {ranks.rank}: {cause} (after rank {first_rank} failed)"
    print(text, file=sys.stderr, end="\n" if text else "", flush=True)
    if not is_first:
        time.sleep(2)
    elif ranks.world > 1 and (ranks.rank == 0 or status == 1):
        # Rank 0 may serve the store, and the launcher must notice a killed rank first.
        time.sleep(1)
    if is_first:
        # Late: torchrun's summary compares whole seconds, and a killed rank must come first.
        record(text)
    _exit(status)


def _exit(status) -> NoReturn:
    """Exit without joining threads: one may wait in a collective forever."""
    launch.finish()
    sys.stdout.flush()
    os._exit(status)
