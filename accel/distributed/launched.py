"""Join the distributed job that torchrun, srun or --gpus started, and end all ranks together.

The launcher starts one process per GPU and kills all of them when one dies.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

from accel import launch
from accel.distributed import Ranks
from accel.errors import (
    STOPPED,
    USAGE,
    Stopped,
    UsageError,
    as_usage_error,
    record,
    shown,
)


class RankInfo(NamedTuple):
    """The rank of a process, as torch.distributed numbers it."""

    rank: int = 0
    world: int = 1  # number of ranks
    local_rank: int = 0  # rank within the node


def rank_info() -> RankInfo:
    """Read the rank from the environment of torchrun or srun; default: one process. Raises
    UsageError for invalid values.
    """
    if "RANK" in os.environ:
        world = _integer("WORLD_SIZE", 1, 2**31)
        rank = _integer("RANK", 0, world)
        local_rank = _integer("LOCAL_RANK", 0, world) if "LOCAL_RANK" in os.environ else 0
        return RankInfo(rank, world, local_rank)
    if launch.is_task_of_srun():  # not the batch script itself, which has no step
        world = _integer("SLURM_STEP_NUM_TASKS", 1, 2**31)
        rank = _integer("SLURM_PROCID", 0, world)
        return RankInfo(rank, world, _integer("SLURM_LOCALID", 0, world))
    return RankInfo()


def _integer(name, least, end):
    """Read an integer from an environment variable, least <= value < end."""
    value = os.environ.get(name)
    if value is None or not re.fullmatch("[0-9]{1,18}", value) or not least <= int(value) < end:
        given = "is not set" if value is None else f"is {value[:40]!r}"
        raise UsageError(
            f"the environment's {name} {given}, a launcher sets it to {least} … {end - 1}: start "
            "the ranks with torchrun or srun, or unset RANK for one process"
        )
    return int(value)


def _set_address(environment: MutableMapping[str, str]) -> None:
    """Set MASTER_ADDR and MASTER_PORT under srun: the first host of the step, and a port derived
    from the job and step ids. Raises UsageError if the address cannot be resolved.
    """
    if "SLURM_STEP_ID" in environment and "MASTER_PORT" not in environment:
        job = _integer("SLURM_JOB_ID", 0, 2**32)
        step = _integer("SLURM_STEP_ID", 0, 2**32)
        environment["MASTER_PORT"] = str(12000 + (job * 16 + step % 16) % 20000)
    port = _integer("MASTER_PORT", 1, 2**16)
    if "MASTER_ADDR" not in environment:
        environment["MASTER_ADDR"] = _first_host(environment.get("SLURM_STEP_NODELIST", ""))
    address = environment["MASTER_ADDR"]
    try:
        socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # torch would retry for a minute
        raise UsageError(
            f"the environment's MASTER_ADDR {shown(address)} is not the name of a host "
            f"({error}): start the ranks with torchrun or srun, or export the first host's"
        ) from None


def _first_host(nodes):
    """Return the first host of a Slurm node list such as gpu[01-04]."""
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        hosts = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(
            f"srun: scontrol names no hosts ({error}); export MASTER_ADDR, the first of them"
        ) from None
    return hosts.split()[0]


def _join():
    """Connect to the other ranks of this job. Raises UsageError if a rank is missing."""
    info = rank_info()
    if info.world == 1:
        return Ranks()
    from accel.distributed.process_group import connect  # lazy: imports torch.distributed

    _set_address(os.environ)
    launch.die_with_parent()
    # Hide the lines that gloo prints, and the output of all ranks but 0.
    printed = os.dup(1) if info.rank == 0 else os.open(os.devnull, os.O_WRONLY)
    coding = dict(encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    sys.stdout = os.fdopen(printed, "w", buffering=1, **coding)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return connect(*info)


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
        # All ranks of srun fail alike: print on rank 0, or where the rank itself is invalid.
        is_rank_0 = not os.environ.get("SLURM_PROCID", "").lstrip("0").isdecimal()
        if "SLURM_STEP_ID" not in os.environ or is_rank_0:
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
    first = ranks.first_failure(USAGE if mistake else 1)
    is_first = first.rank == ranks.rank
    text = ""
    if is_first and mistake:
        text = "\n".join(f"{program}: {line}" for line in worded(mistake).splitlines())
    elif is_first:
        text = f"rank {ranks.rank} of {ranks.world} on {socket.gethostname()}:\n"
        text += traceback.format_exc()
    elif first.status in dict(launch.ENDINGS.values()) and ranks.rank == 0:
        line = dict(launch.ENDINGS.values())[first.status]
        text = f"{program}: rank {first.rank}: {line}"
    elif first.status == 1:
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        text = f"rank {ranks.rank}: {cause} (after rank {first.rank} failed)"
    print(text, file=sys.stderr, end="\n" if text else "", flush=True)
    if not is_first:
        time.sleep(2)
    elif ranks.world > 1 and (ranks.rank == 0 or first.status == 1):
        # Rank 0 may serve the store, and the launcher must notice a killed rank first.
        time.sleep(1)
    if is_first:
        # Late: torchrun's summary compares whole seconds, and a killed rank must come first.
        record(text)
    _exit(first.status)


def _exit(status) -> NoReturn:
    """Exit without joining threads: one may wait in a collective forever."""
    launch.finish()
    sys.stdout.flush()
    os._exit(status)
