"""Exit after a signal with one line and an exit status."""

import os
import signal
import sys
from collections.abc import Iterable
from types import FrameType

from accel.errors import INTERRUPTED, STOPPED

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

_rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
# True without a rank and for an invalid rank: only this process prints.
IS_FIRST_RANK = not _rank.lstrip("0").isdecimal()
_last_line: list[str] = []  # set by a signal


def is_task_of_srun() -> bool:
    """Whether srun started this process as a task of a job step. False within an interactive step
    (srun --pty bash), unless a nested step started it, which has no terminal.
    """
    in_terminal = "SLURM_PTY_PORT" in os.environ and any(map(os.isatty, (0, 1, 2)))
    return "SLURM_STEP_NUM_TASKS" in os.environ and not in_terminal


def handle_signals() -> None:
    """Handle the signals of ENDINGS. Ignored signals (nohup) stay ignored."""
    is_rank = "RANK" in os.environ or is_task_of_srun()
    end_on(RANK_ENDINGS if is_rank else ENDINGS)


def end_on(numbers: Iterable[int]) -> None:
    """Exit on these signals of ENDINGS. Ignored signals stay ignored."""
    for number in numbers:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, on_signal)


def on_signal(number: int, frame: FrameType | None) -> None:
    """Raise SystemExit, which removes partial files; `finish` prints the message."""
    status, line = ENDINGS[number]
    _last_line[:] = [line]
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
