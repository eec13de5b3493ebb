"""How a command ends after a signal: it prints one line and exits with a status."""

import os
import signal
import sys
from collections.abc import Iterable
from types import FrameType

from accel.errors import INTERRUPTED, STOPPED

_STOPPED = STOPPED, "stopped; start again with the same command"
# The exit status and the last line of a command after a signal.
ENDINGS: dict[int, tuple[int, str]] = {
    signal.SIGINT: (INTERRUPTED, "interrupted"),
    signal.SIGTERM: _STOPPED,
    signal.SIGHUP: _STOPPED,
    signal.SIGUSR1: _STOPPED,  # from queues, before they take a job's nodes away
}
# SIGTERM comes from the ranks' launcher, which prints the cause.
RANK_ENDINGS = signal.SIGINT, signal.SIGHUP, signal.SIGUSR1

_rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
# Rank 0, the only process, or a process whose rank will be refused: it alone prints.
IS_FIRST_RANK = not _rank.lstrip("0").isdecimal()
_last_line: list[str] = []  # after a signal


def is_task_of_srun() -> bool:
    """Return whether srun started this process as a task of a step. A command that is given in
    an interactive step, srun --pty bash, is a process by itself. A step that is started there
    inherits its variables, and has no terminal.
    """
    in_terminal = "SLURM_PTY_PORT" in os.environ and any(map(os.isatty, (0, 1, 2)))
    return "SLURM_STEP_NUM_TASKS" in os.environ and not in_terminal


def handle_signals() -> None:
    """End this command by ENDINGS from here on. Leave signals that are ignored, as by nohup."""
    is_rank = "RANK" in os.environ or is_task_of_srun()
    end_on(RANK_ENDINGS if is_rank else ENDINGS)


def end_on(numbers: Iterable[int]) -> None:
    """End this command by these signals of ENDINGS. Leave those that are ignored."""
    for number in numbers:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, on_signal)


def on_signal(number: int, frame: FrameType | None) -> None:
    """End the command by one of ENDINGS: raise SystemExit, so that a partial file is
    removed; `finish` prints the line.
    """
    status, line = ENDINGS[number]
    _last_line[:] = [line]
    sys.exit(status)


def finish() -> None:
    """Print the line of the signal that ended the command."""
    for line in _last_line:
        print_line(line)


def print_line(line: str) -> None:
    """Print a line under the command's name. Of a job's ranks only the first prints."""
    if IS_FIRST_RANK:
        newline = "\n" if sys.stderr.isatty() else ""  # below a bar
        print(f"{newline}{os.path.basename(sys.argv[0])}: {line}", file=sys.stderr)
