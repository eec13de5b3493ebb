"""The beginning of a command, and the processes of --gpus: one a GPU, which find each
other as torchrun's ranks do. Jobs over several nodes stay with torchrun and srun.
"""

import argparse
import atexit
import ctypes
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from accel import streams
from accel.driver import count_gpus
from accel.errors import UsageError
from accel.signals import ENDINGS, exit_now, finish, handle_signals

MAX_PROCESSES = 64  # a mistyped number should not fill the machine
# Set for the processes of --gpus: when their parent began, and its process id.
_PARENT_VARIABLE = "DIT_BEGAN"
_PARENT = re.fullmatch(r"(\d{1,12}\.\d{6}) (\d{1,9})", os.environ.get(_PARENT_VARIABLE, ""))
STARTED_HERE = _PARENT is not None
# All processes of a machine share this clock.
_BEGAN = float(_PARENT[1]) if STARTED_HERE else time.perf_counter()


def seconds() -> float:
    """Return the seconds since the command began; in a rank of --gpus, since its parent did."""
    return time.perf_counter() - _BEGAN


def begin() -> None:
    """Begin a command. Call this before the imports that take long.

    From here on Ctrl-C and the other signals of ENDINGS are one line and a status. A
    standard stream that is closed, full or no longer read ends nothing. A rank ends with
    the process that started it.
    """
    streams.replace_standard_streams()
    atexit.register(finish)
    end_with_parent()
    handle_signals()


def end_with_parent() -> None:
    """Have the kernel kill this rank when the process that started it ends: torchrun, or
    the parent of --gpus. A task of srun is left to srun.
    """
    if sys.platform != "linux" or not (STARTED_HERE or "TORCHELASTIC_RUN_ID" in os.environ):
        return
    set_parent_death_signal = 1  # of linux/prctl.h
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    # The parent may have ended before. In a container torchrun may be process 1.
    adopted = os.getppid() == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes()
    orphaned = STARTED_HERE and os.getppid() != int(_PARENT[2])
    if adopted or orphaned:
        exit_now(1, "the process that started this rank has ended")


def parse_gpus(text: str) -> int | None:
    """Return the value of --gpus, for argparse; None for all."""
    if text == "all":
        return None
    if not text.isdecimal() or not 1 <= int(text[:9]) <= MAX_PROCESSES:
        raise argparse.ArgumentTypeError(f"{text}: must be from 1 to {MAX_PROCESSES}, or all")
    return int(text)


GPUS = dict(
    type=parse_gpus,
    default=1,
    metavar="N|all",
    help="make the same picture with N processes, one a GPU (of CUDA_VISIBLE_DEVICES); with "
    "--device cpu, N on the CPU (default: 1)",
)


def world_size(wanted: int | None, device: str | None) -> int:
    """Return the number of processes of --gpus. Raises UsageError under a launcher, and
    for all of no GPUs.
    """
    launched = "RANK" in os.environ
    tasks = os.environ.get("WORLD_SIZE" if launched else "SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1" or launched and wanted != 1:
        raise UsageError(
            "torchrun or srun has started several processes, and each would make the same "
            "picture; use sample_ddp.py, or start one process"
        )
    if wanted == 1:
        return 1
    if wanted is None:
        wanted = 0 if device == "cpu" else count_gpus()
        if not 1 <= wanted <= MAX_PROCESSES:
            raise UsageError(
                f"`gpus=all`: {wanted} GPUs here; give a number of processes, from 1 to "
                f"{MAX_PROCESSES}"
            )
    return wanted


def run_ranks(world: int, program: str) -> int:
    """Run this command as `world` ranks and return the exit status. All end when one fails
    or a signal comes.
    """
    received = []
    for number in ENDINGS:
        if signal.getsignal(number) != signal.SIG_IGN:  # by nohup, or by a shell's &
            signal.signal(number, lambda number, _: received.append(number))
    processes = _start(world)
    statuses = [None] * world
    while not received and not any(statuses) and None in statuses:
        time.sleep(0.01)
        statuses = [process.poll() for process in processes]
    _end(processes)

    status = next(filter(None, statuses), 0)
    line = None
    if received:
        status, line = ENDINGS[received[0]]
    elif status < 0:
        line = f"rank {statuses.index(status)} of {world}: ended by signal {-status}"
    if line:
        print(f"\n{program}: {line}", file=sys.stderr)  # below a bar
    elif status and sys.stderr.isatty():
        print(end="\r\033[K", file=sys.stderr)  # a bar that rank 0 drew after the message
    return max(status, 1) if status else 0


def _start(world):
    """Start this command once a rank. Return the processes."""
    threads = max(1, (os.cpu_count() or 1) // world)
    common = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(world),
        _PARENT_VARIABLE: f"{_BEGAN:.6f} {os.getpid()}",
    }
    processes = []
    for rank in map(str, range(world)):
        process = subprocess.Popen(
            [sys.executable, *sys.argv],
            env={**common, "RANK": rank, "LOCAL_RANK": rank},
            # A session of its own: Ctrl-C reaches the parent alone, which ends all ranks
            # without a traceback of each.
            start_new_session=True,
        )
        processes.append(process)
    return processes


def _free_port():
    """Return a port below the range of outgoing connections, which could take it before
    rank 0 does.
    """
    while True:
        port = random.randrange(16000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _end(processes):
    """End the processes that still run: a grid has nothing to record."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + 2
    for process in processes:
        try:
            process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
