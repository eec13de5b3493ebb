"""How a command ends when it does not succeed: the errors it reports in one line, and its exit statuses."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

USAGE = 2  # a mistake in what the user asked for
STOPPED = 75  # the job was asked to stop and can be continued: EX_TEMPFAIL of sysexits.h
INTERRUPTED = 130  # Ctrl-C: 128 + SIGINT


class UsageError(ValueError):
    """A mistake in what the user asked for: one line that names the flag and the remedy. Commands exit with USAGE."""


class Stopped(Exception):
    """The job was asked to stop and has recorded its work; the text goes to the user. Commands exit with STOPPED."""


def shown(value: object, most: int = 80) -> str:
    """`value` as a message shows it: on one line, without control characters, and not longer than `most`."""
    text = value if isinstance(value, str) and value.isprintable() and value else repr(value)
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 4 :]}"


@contextmanager
def path_errors(flag: str, path: str | Path, remedy: str = "choose another path") -> Iterator[None]:
    """Turn an OSError of the block into a UsageError about `path`, which the user named by `flag`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror or error}; {remedy}") from None
