"""Standard streams that outlive a full disk, a closed pipe and a terminal's control
characters.
"""

import errno
import io
import os
import sys

from accel.errors import printable


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


def lasting(descriptor: int, like: io.TextIOBase | None = None) -> io.TextIOWrapper:
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
