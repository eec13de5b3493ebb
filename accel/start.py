"""How a command starts: when it began, its import of torch, and the processes that it starts itself, one a GPU.

They find each other as torchrun's ranks do. Jobs over several nodes stay with torchrun and srun.
"""

import argparse
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

from accel.errors import INTERRUPTED, STOPPED, UsageError

MOST = 64  # processes: a mistyped number should not fill the machine
_BEGAN = "DIT_BEGAN"  # set for the processes started here: the moment at which their parent began
STARTED_HERE = _BEGAN in os.environ
BEGAN = float(os.environ.get(_BEGAN) or time.perf_counter())  # one clock for all processes of a machine
ENDINGS = {
    signal.SIGINT: (INTERRUPTED, "interrupted; nothing was written"),
    signal.SIGTERM: (STOPPED, "stopped; nothing was written"),
    signal.SIGHUP: (STOPPED, "stopped; nothing was written"),
}


def seconds() -> float:
    """Since the command began, and not one of the processes that it has started."""
    return time.perf_counter() - BEGAN


def import_torch(device: str | None) -> None:
    """Import torch, and meanwhile let the driver make the context of the GPU that this process will take.

    device: as the user gave it. The import runs without the garbage collector, which never goes through what torch has
    made then: most of it stays to the end of the process, and at the end it would be gone through once more.
    """
    if "torch" in sys.modules:  # a notebook's, whose garbage must not stay
        return
    kind, _, number = (device or "cuda").partition(":")
    if kind == "cuda":
        threading.Thread(target=_make_context, args=(number,), daemon=True).start()
    gc.disable()
    import torch  # noqa: F401

    gc.freeze()
    gc.enable()


def _make_context(number):
    """A context of GPU `number`, "" for this process's own, for torch to find. What fails here fails there too, and
    torch says it better."""
    with suppress(Exception):
        visible = _visible_gpus()
        from cuda.bindings import driver

        number = number or os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
        driver.cuDevicePrimaryCtxRetain(driver.cuDeviceGet(int(number) % visible)[1])


def gpus(text: str) -> int | None:
    """The value of --gpus, for argparse; None for all."""
    if text == "all":
        return None
    if not text.isdecimal() or not 1 <= int(text[:9]) <= MOST:
        raise argparse.ArgumentTypeError(f"{text}: must be from 1 to {MOST}, or all")
    return int(text)


GPUS = dict(
    type=gpus,
    default=1,
    metavar="N|all",
    help="make the same picture with N processes, one a GPU (of CUDA_VISIBLE_DEVICES); with --device cpu, N on the CPU "
    "(default: 1)",
)


def world_size(wanted: int | None, device: str | None) -> int:
    """How many processes --gpus asks for. Raises UsageError under a launcher, and for all of no GPUs."""
    if wanted == 1:
        return 1
    if "RANK" in os.environ or os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        raise UsageError("`gpus`: torchrun or srun has started several processes; start one, or use sample_ddp.py")
    if wanted is None:
        wanted = 0 if device == "cpu" else _visible_gpus()
        if not 1 <= wanted <= MOST:
            raise UsageError(f"`gpus=all`: {wanted} GPUs here; give a number of processes, from 1 to {MOST}")
    return wanted


def _visible_gpus():
    """The driver's count, as CUDA_VISIBLE_DEVICES leaves it: a tenth of a second where torch takes seconds."""
    with suppress(ImportError, RuntimeError):  # a torch without CUDA, a machine without a driver
        from cuda.bindings import driver

        if driver.cuInit(0)[0] == 0:
            return int(driver.cuDeviceGetCount()[1])
    return 0


def run(world: int, program: str) -> int:
    """Run this very command as `world` ranks → the exit status. When one rank fails, or a signal comes, all end."""
    signals = []
    for number in ENDINGS:
        if signal.getsignal(number) != signal.SIG_IGN:  # by nohup, or by a shell's &
            signal.signal(number, lambda number, _: signals.append(number))
    processes = _start(world)
    statuses = [None] * world
    while not signals and not any(statuses) and None in statuses:
        time.sleep(0.01)
        statuses = [process.poll() for process in processes]
    _end(processes)
    status = next(filter(None, statuses), 0)
    line = f"rank {statuses.index(status)} of {world}: ended by signal {-status}" if status < 0 else None
    if signals:
        status, line = ENDINGS[signals[0]]
    if line:
        print(f"\n{program}: {line}", file=sys.stderr)  # below a bar
    elif status and sys.stderr.isatty():
        print(end="\r\033[K", file=sys.stderr)  # a bar that rank 0 drew after the message
    return max(status, 1) if status else 0


def _start(world):
    port = _free_port()
    common = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world), **{_BEGAN: str(BEGAN)})
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world)), **os.environ}
    ranks = [{**threads, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    # Sessions of their own: Ctrl-C reaches the parent alone, which ends all ranks without a traceback of each.
    command = [sys.executable, *sys.argv]
    return [subprocess.Popen(command, env=environment, start_new_session=True) for environment in ranks]


def _free_port():
    """One below those that systems give to outgoing connections, which could take it before rank 0 does."""
    while True:
        port = random.randrange(16000, 32000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def _end(processes):
    """End what still runs: a grid has nothing to record."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + 2
    for process in processes:
        try:
            process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
