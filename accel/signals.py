"""How a command ends: after a signal it prints one line and exits with a status. Its standard
streams outlive a full disk, a closed pipe and a terminal's control characters.
"""

import errno
import io
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import TextIO

from accel.errors import INTERRUPTED, STOPPED, printable

_STOPPED = STOPPED, "stopped; start again with the same command"
# The exit status and the last line of a command after a signal.
ENDINGS: dict[int, tuple[int, str]] = {
    signal.SIGINT: (INTERRUPTED, "interrupted"),
    signal.SIGTERM: _STOPPED,
    signal.SIGHUP: _STOPPED,
    signal.SIGUSR1: _STOPPED,  # from queues, before they take a job's nodes away
}
# SIGTERM comes from the ranks' launcher, which prints the cause.
ENDINGS_OF_RANKS = signal.SIGINT, signal.SIGHUP, signal.SIGUSR1

_rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
# Rank 0, the only process, or a process whose rank will be refused: it alone prints.
IS_FIRST_RANK = not _rank.lstrip("0").isdecimal()
_last_line: list[str] = []  # after a signal, until it is printed


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
    end_on(ENDINGS_OF_RANKS if is_rank else ENDINGS)


def end_on(numbers: Iterable[int]) -> None:
    """End this command by these signals of ENDINGS. Leave those that are ignored."""
    for number in numbers:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, on_signal)


def on_signal(number: int, frame: FrameType | None) -> None:
    """End the command by one of ENDINGS: raise SystemExit, so that a partial file is
    removed; `finish` prints the line. During an import exit at once: C++ would turn the
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
        exit_now(status, line)
    _last_line[:] = [line]
    sys.exit(status)


def finish() -> None:
    """Flush the standard streams. Report the signal that ended the command, and output that
    a full disk refused.
    """
    failure = take_failure()
    while _last_line:
        _print_line(_last_line.pop())
    if failure:
        print(
            f"{_program()}: standard output: {failure.strerror}; the work itself is done",
            file=sys.stderr,
        )
    sys.stderr.flush()
    for number in ENDINGS:
        # The interpreter restores the default at its end, which kills.
        if signal.getsignal(number) is on_signal:
            signal.signal(number, signal.SIG_IGN)


def exit_now(status: int, line: str) -> None:
    """Print `line` and exit without running anything else."""
    _print_line(line)
    os._exit(status)


def _print_line(line):
    """Print `line` under the command's name, below a bar. Of a job's ranks only the first
    prints.
    """
    if not IS_FIRST_RANK:
        return
    newline = "\n" if os.isatty(2) else ""
    with suppress(OSError):
        os.write(2, f"{newline}{_program()}: {line}\n".encode())


def _program():
    return os.path.basename(sys.argv[0])


# ---- Standard streams ----


class _Lasting(io.FileIO):
    """A standard stream that cannot fail: it drops bytes that a full disk or a closed pipe
    refuses.
    """

    failure = None  # the first OSError of a write

    def write(self, data):
        try:
            return super().write(data)
        except OSError as error:
            self.failure = self.failure or error
            return len(data)


class _Printable(io.TextIOWrapper):
    """Text with escaped control characters: names that files hold do not steer a terminal."""

    def write(self, text):
        lines = [printable(line, most=sys.maxsize) for line in text.split("\n")]
        super().write("\n".join(lines))
        return len(text)


def replace_standard_streams() -> None:
    """Replace standard output and error by streams whose writes do not fail. Open the
    null device for a closed stream: the next file that is opened would get its number.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = lasting(1, sys.stdout)
    sys.stderr = lasting(2, sys.stderr)


def lasting(descriptor: int, like: TextIO | None = None) -> io.TextIOWrapper:
    """Return a text stream to `descriptor` whose writes do not fail. like: the stream whose
    encoding it takes.
    """
    raw = _Lasting(descriptor, "w", closefd=False)
    wrapper = io.TextIOWrapper if descriptor == 2 else _Printable  # a bar moves the cursor
    return wrapper(
        io.BufferedWriter(raw),
        encoding=like.encoding if like is not None else None,
        errors=like.errors if like is not None else None,
        line_buffering=descriptor != 1 or raw.isatty(),
    )


def take_failure() -> OSError | None:
    """Flush standard output. Return the error by which a disk refused it, once. Return None
    also where nobody reads the output.
    """
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(raw, _Lasting):
        return None
    failure = raw.failure
    raw.failure = None
    if failure is None or failure.errno in (errno.EPIPE, errno.EBADF):
        return None
    return failure
