"""Start a command: signal handlers, the number of processes, and the import of torch, in parallel
with the creation of the CUDA context. After a signal, exit with one line and an exit status.
"""

import argparse
import atexit
import ctypes
import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType

from accel.errors import INTERRUPTED, STOPPED, USAGE, UsageError, as_usage_error

MAX_PROCESSES = 64  # catches typing errors
# Set for the ranks of --gpus: start time and process id of their parent.
PARENT_VARIABLE = "DIT_BEGAN"
_PARENT = re.fullmatch(r"(\d{1,12}\.\d{6}) (\d{1,9})", os.environ.get(PARENT_VARIABLE, ""))
IS_GPUS_RANK = _PARENT is not None
# When the command started; --gpus: its parent process. perf_counter is the same clock in all
# processes of a machine.
START_TIME = float(_PARENT[1]) if _PARENT is not None else time.perf_counter()

_STOPPED = STOPPED, "stopped; start again with the same command"
# Exit status and message by signal.
ENDINGS: dict[int, tuple[int, str]] = {
    signal.SIGINT: (INTERRUPTED, "interrupted"),
    signal.SIGTERM: _STOPPED,
    signal.SIGHUP: _STOPPED,
    signal.SIGUSR1: _STOPPED,  # sent by queues before preemption
}
# Without SIGTERM: the launcher sends it and prints the cause.
RANK_ENDINGS = signal.SIGINT, signal.SIGHUP, signal.SIGUSR1

# Only this process prints.
IS_FIRST_RANK = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
_last_line: list[str] = []  # set by a signal


def begin() -> None:
    """Install signal and exception handlers. Call this before slow imports.

    Afterwards Ctrl-C and the other signals of ENDINGS print one line and set the exit status, and
    a rank is killed when its parent exits.
    """
    atexit.register(finish)
    die_with_parent()
    end_on(RANK_ENDINGS if "RANK" in os.environ or is_task_of_srun() else ENDINGS)
    sys.excepthook = report_and_exit


def report_and_exit(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """An excepthook: print a user's error as one line and exit. It catches errors of imports, which
    run before the command has a parser.
    """
    usage_error = as_usage_error(error)
    if usage_error is None:
        return sys.__excepthook__(kind, error, traceback)
    print_line(usage_error.by_flags())
    sys.exit(USAGE)


def die_with_parent() -> None:
    """Have the kernel kill this rank when its parent, torchrun or --gpus, exits. No-op under srun,
    which does this itself.
    """
    if sys.platform != "linux" or not (IS_GPUS_RANK or "TORCHELASTIC_RUN_ID" in os.environ):
        return
    set_parent_death_signal = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    # The parent may have exited already. In a container, process 1 may be torchrun.
    adopted = os.getppid() == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes()
    orphaned = _PARENT is not None and os.getppid() != int(_PARENT[2])
    if adopted or orphaned:
        print_line("the process that started this rank has exited")
        sys.exit(1)


def parse_gpus(text: str) -> int | None:
    """Parse --gpus for argparse; "all" becomes None."""
    if text == "all":
        return None
    if not text.isdecimal() or not 1 <= int(text[:9]) <= MAX_PROCESSES:
        raise argparse.ArgumentTypeError(f"{text}: must be from 1 to {MAX_PROCESSES}, or all")
    return int(text)


def world_size(wanted: int | None, device: str | None) -> int:
    """Return the number of processes for --gpus. Raises UsageError under another launcher, and for
    "all" without GPUs.
    """
    launched = "RANK" in os.environ
    # By torchrun; or by Open MPI, and by MPICH and Intel MPI.
    counts = ["WORLD_SIZE"] if launched else ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]
    if not launched and is_task_of_srun():
        counts.append("SLURM_STEP_NUM_TASKS")
    has_several_ranks = any(os.environ.get(name, "1") != "1" for name in counts)
    if has_several_ranks or launched and wanted != 1:
        raise UsageError(
            "torchrun, srun or mpirun has started several processes, and each would make the same "
            "picture; start sample_ddp.py by torchrun or srun, or one process"
        )
    if wanted is None:
        from accel.launch import driver  # lazy: imports cuda.bindings

        wanted = 0 if device == "cpu" else driver.count_gpus()
        if not 1 <= wanted <= MAX_PROCESSES:
            raise UsageError(
                f"{wanted} GPUs here",
                f"give a number of processes, from 1 to {MAX_PROCESSES}",
                parameter="gpus",
                value="all",
            )
    return wanted


def import_torch(device: str | None) -> None:
    """Import torch while a thread creates the CUDA context. device: the user's --device.

    The garbage collector is off during the import, and the imported objects, which live until
    exit, are frozen.
    """
    if "torch" in sys.modules:  # in a notebook, whose objects must not be frozen
        return
    device_type, _, number = (device or "cuda").partition(":")
    if device_type == "cuda":
        from accel.launch import driver

        threading.Thread(target=driver.make_context, args=(number,), daemon=True).start()
    gc.disable()
    import torch  # noqa: F401

    gc.freeze()
    gc.enable()


# ---- Signals ----


def is_task_of_srun() -> bool:
    """Whether srun started this process as a task of a job step. False within an interactive step
    (srun --pty bash), unless a nested step started it, which has no terminal.
    """
    in_terminal = "SLURM_PTY_PORT" in os.environ and any(map(os.isatty, (0, 1, 2)))
    return "SLURM_STEP_NUM_TASKS" in os.environ and not in_terminal


def end_on(numbers: Iterable[int]) -> None:
    """Exit on these signals of ENDINGS. Ignored signals (nohup) stay ignored."""
    for number in numbers:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, on_signal)


def on_signal(number: int, frame: FrameType | None) -> None:
    """Raise SystemExit, which removes partial files; `finish` prints the message. During an import
    exit at once: Python and extension modules ignore exceptions there.
    """
    status, line = ENDINGS[number]
    _last_line[:] = [line]
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            finish()
            os._exit(status)
        frame = frame.f_back
    sys.exit(status)


def finish() -> None:
    """Print the message of the signal, if any, at exit."""
    for line in _last_line:
        print_line(line)


def print_line(line: str) -> None:
    """Print a line with the command's name, on the first rank only."""
    if IS_FIRST_RANK:
        newline = "\n" if sys.stderr.isatty() else ""  # below a progress bar
        print(f"{newline}{os.path.basename(sys.argv[0])}: {line}", file=sys.stderr)
