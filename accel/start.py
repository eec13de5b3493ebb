"""The beginning and end of a command: its signals, its standard streams, its import of
torch, and the processes that it starts itself, one a GPU, which find each other as
torchrun's ranks do.

Jobs over several nodes stay with torchrun and srun.
"""

import argparse
import atexit
import ctypes
import errno
import gc
import io
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from accel.errors import INTERRUPTED, STOPPED, UsageError, printable

MOST = 64  # processes; a mistyped number should not fill the machine
# set for the processes started here: the time at which their parent began, and its
# process id
_BEGAN = "DIT_BEGAN"
_PARENT = re.fullmatch(r"(\d{1,12}\.\d{6}) (\d{1,9})", os.environ.get(_BEGAN, ""))
STARTED_HERE = _PARENT is not None
# one clock for all processes of a machine
BEGAN = float(_PARENT[1]) if STARTED_HERE else time.perf_counter()
_RANK = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
# rank 0, the only process, or one whose number will be refused
FIRST = not _RANK.lstrip("0").isdecimal()
# the last by queues, before they take a job's nodes away
_STOPS = signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1
ENDINGS = {signal.SIGINT: (INTERRUPTED, "interrupted")}
ENDINGS |= dict.fromkeys(_STOPS, (STOPPED, "stopped; start again with the same command"))
_ended_by = []  # the signal, until its line is printed
# SIGTERM comes from their launcher, which prints the cause
OF_RANKS = signal.SIGINT, signal.SIGUSR1


def seconds() -> float:
    """Return the seconds since the command began: in a rank that it started, since its
    parent did.
    """
    return time.perf_counter() - BEGAN


def begin() -> None:
    """Begin a command. Call this before the imports that take long.

    From here on Ctrl-C and the other signals of ENDINGS are one line and a status. A
    standard stream that is closed, full or no longer read ends nothing. A rank ends with
    the process that started it.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: the next file that is opened would get its number
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = lasting(1, sys.stdout)
    sys.stderr = lasting(2, sys.stderr)
    atexit.register(flush)
    end_with_parent()
    for number in (
        OF_RANKS if "RANK" in os.environ or "SLURM_STEP_NUM_TASKS" in os.environ else ENDINGS
    ):
        # not ignored, as by nohup
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, on_signal)


class _Lasting(io.FileIO):
    """A standard stream that cannot fail: it drops the bytes that a full disk or a closed
    pipe refuses.
    """

    failure = None

    def write(self, data):
        try:
            return super().write(data)
        except OSError as error:
            self.failure = self.failure or error
            return len(data)


class _Printable(io.TextIOWrapper):
    """Text with escaped control characters: names that files hold do not steer a terminal."""

    def write(self, text):
        super().write("\n".join(printable(line, most=sys.maxsize) for line in text.split("\n")))
        return len(text)


def lasting(descriptor: int, like: io.TextIOBase | None = None) -> io.TextIOWrapper:
    """Return a text stream to `descriptor` whose writes do not fail; like: the stream
    whose encoding it takes.
    """
    raw = _Lasting(descriptor, "w", closefd=False)
    options = dict(encoding=like.encoding, errors=like.errors) if like is not None else {}
    text = io.TextIOWrapper if descriptor == 2 else _Printable  # a bar moves the cursor
    return text(io.BufferedWriter(raw), line_buffering=descriptor != 1 or raw.isatty(), **options)


def flush() -> None:
    """Flush the standard streams. Report the signal that ended the command, and output
    that a full disk refused.
    """
    failure = take_failure()
    while _ended_by:
        _say(ENDINGS[_ended_by.pop()][1])
    if failure:
        print(
            f"{_program()}: standard output: {failure.strerror}; the work itself is done",
            file=sys.stderr,
        )
    sys.stderr.flush()
    for number in ENDINGS:
        # the interpreter restores the default at its end, which kills
        if signal.getsignal(number) is on_signal:
            signal.signal(number, signal.SIG_IGN)


def take_failure() -> OSError | None:
    """Flush standard output. Return the error by which a disk refused it, once; None also
    where nobody reads it.
    """
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    failure = None
    if isinstance(raw, _Lasting):
        failure = raw.failure
        raw.failure = None
    return failure if failure and failure.errno not in (errno.EPIPE, errno.EBADF) else None


def end_with_parent() -> None:
    """Have the kernel kill this rank when the process that started it ends: torchrun, or
    the parent of --gpus. A task of srun is left to srun.
    """
    if sys.platform != "linux" or not (STARTED_HERE or "TORCHELASTIC_RUN_ID" in os.environ):
        return
    set_parent_death_signal = 1  # of linux/prctl.h
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    # It may have ended before. In a container torchrun may be process 1.
    init = os.getppid() == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes()
    if STARTED_HERE and os.getppid() != int(_PARENT[2]) or init:
        _leave(1, "the process that started this rank has ended")


def on_signal(number: int, frame: FrameType | None) -> None:
    """End the command by one of ENDINGS: raise SystemExit, so that a partial file is
    removed; `flush` prints the line. During an import exit at once: C++ would turn the
    exception into others. After the command's last line do nothing.
    """
    status, line = ENDINGS[number]
    importing = False
    outermost = None
    while frame is not None:
        importing |= frame.f_code.co_filename == "<frozen importlib._bootstrap>"
        outermost = frame.f_globals.get("__name__")
        frame = frame.f_back
    if outermost not in ("__main__", "runpy"):
        return
    if importing:
        _leave(status, line)
    _ended_by[:] = [number]
    sys.exit(status)


def _leave(status, line):
    _say(line)
    os._exit(status)


def _say(line):
    """Print `line` under the command's name; of the ranks of a job only the first does.
    It may follow a bar.
    """
    if FIRST:
        with suppress(OSError):
            os.write(2, f"{chr(10) * os.isatty(2)}{_program()}: {line}\n".encode())


def _program():
    return os.path.basename(sys.argv[0])


def import_torch(device: str | None) -> None:
    """Import torch while the driver makes the context of this process's GPU. device: as
    the user gave it. The garbage collector is off during the import and the objects are
    frozen: they live until exit.
    """
    if "torch" in sys.modules:  # in a notebook, whose own garbage must not be frozen
        return
    kind, _, number = (device or "cuda").partition(":")
    if kind == "cuda":
        threading.Thread(target=_make_context, args=(number,), daemon=True).start()
    gc.disable()
    import torch  # noqa: F401

    gc.freeze()
    gc.enable()


def _make_context(number):
    """Make the context of GPU `number`, "" for this process's own, before torch asks for
    it. torch meets the same failures and reports them better.
    """
    with suppress(Exception):
        visible = _visible_gpus()
        from cuda.bindings import driver

        number = number or os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
        driver.cuDevicePrimaryCtxRetain(driver.cuDeviceGet(int(number) % visible)[1])


def gpus(text: str) -> int | None:
    """Return the value of --gpus, for argparse; None for all."""
    if text == "all":
        return None
    if not text.isdecimal() or not 1 <= int(text[:9]) <= MOST:
        raise argparse.ArgumentTypeError(f"{text}: must be from 1 to {MOST}, or all")
    return int(text)


GPUS = dict(
    type=gpus,
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
        wanted = 0 if device == "cpu" else _visible_gpus()
        if not 1 <= wanted <= MOST:
            raise UsageError(
                f"`gpus=all`: {wanted} GPUs here; give a number of processes, from 1 to {MOST}"
            )
    return wanted


def _visible_gpus():
    """Return the driver's count of visible GPUs: a tenth of a second where torch takes seconds."""
    with suppress(ImportError, RuntimeError):  # a torch without CUDA, a machine without a driver
        from cuda.bindings import driver

        if driver.cuInit(0)[0] == 0:
            return int(driver.cuDeviceGetCount()[1])
    return 0


def run(world: int, program: str) -> int:
    """Run this command as `world` ranks and return the exit status. All end when one
    fails or a signal comes.
    """
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
    line = (
        f"rank {statuses.index(status)} of {world}: ended by signal {-status}"
        if status < 0
        else None
    )
    if signals:
        status, line = ENDINGS[signals[0]]
    if line:
        print(f"\n{program}: {line}", file=sys.stderr)  # below a bar
    elif status and sys.stderr.isatty():
        print(end="\r\033[K", file=sys.stderr)  # a bar that rank 0 drew after the message
    return max(status, 1) if status else 0


def _start(world):
    common = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world)), **os.environ}
    common |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()), WORLD_SIZE=str(world))
    common[_BEGAN] = f"{BEGAN:.6f} {os.getpid()}"
    ranks = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    # Sessions of their own: Ctrl-C reaches the parent alone, which ends all ranks without
    # a traceback of each.
    command = [sys.executable, *sys.argv]
    return [
        subprocess.Popen(command, env=environment, start_new_session=True) for environment in ranks
    ]


def _free_port():
    """Return a port below the range of outgoing connections, which could take it before
    rank 0 does.
    """
    while True:
        port = random.randrange(16000, 32000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
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
