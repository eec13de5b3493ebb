"""Errors that a command reports in one line, and its exit statuses."""

import errno
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

log = logging.getLogger(__name__)

CONVERTER = "scripts/convert_checkpoint.py"
USAGE = 2  # a mistake in the user's request
STOPPED = 75  # the job was asked to stop and can be continued: EX_TEMPFAIL of sysexits.h
INTERRUPTED = 130  # Ctrl-C: 128 + SIGINT

REFERENCE = re.compile(r"`([a-z]\w*)(?:=([^`]*))?`")


class Worded:
    """A line with parameters in backquotes, such as "use `cfg_scale=1`". str() formats it for
    Python (cfg_scale=1), `by_flags` for a command (--cfg-scale 1).
    """

    def __init__(self, marked: str):
        self.marked = marked  # the line with backquotes

    def __str__(self):
        return REFERENCE.sub(lambda match: match[0][1:-1], self.marked)

    def by_flags(self, flags: Mapping[str, str] = MappingProxyType({})) -> str:
        """Format the line for a command. flags: parameter → flag, if the names differ."""

        def flag(match):
            name, value = match.groups()
            name = flags.get(name, "--" + name.replace("_", "-"))
            if value in (None, "True"):
                return name
            return f"--no-{name[2:]}" if value == "False" else f"{name} {value}"

        return REFERENCE.sub(flag, self.marked)


class UsageError(Worded, ValueError):
    """A user's mistake.

    parameter, value: the wrong option or argument, if any. problem, remedy: text; further
    parameters are in backquotes.
    """

    def __init__(
        self, problem: str, remedy: str = "", *, parameter: str = "", value: object = None
    ):
        ValueError.__init__(self, problem, remedy)
        self.problem = problem
        self.remedy = remedy
        self.parameter = parameter
        self.value = value
        given = "" if value is None else f"={value}"
        subject = f"`{parameter}{given}`: " if parameter else ""
        self.marked = f"{subject}{problem}; {remedy}" if remedy else f"{subject}{problem}"


def warn(text: str) -> None:
    """Print a notice. text: with parameters in backquotes."""
    log.warning(Worded(text))


class InputRef(NamedTuple):
    """A file or folder passed as an option, or a module. Errors and notices start with it."""

    name: str
    option: str = "ckpt"  # "" if not passed as an option

    def error(self, problem: str, remedy: str = "") -> UsageError:
        """Return the error about it."""
        if not self.option:
            return UsageError(f"{self.name}: {problem}", remedy)
        return UsageError(problem, remedy, parameter=self.option, value=self.name)

    def notice(self, text: str) -> str:
        """Return a notice about it."""
        return f"{shown(self.name, 300)}: {text}"

    def warn(self, text: str) -> None:
        """Print a notice about it."""
        warn(self.notice(text))

    def override_hint(self, option: str, value: str = "") -> str:
        """Return the remedy for metadata that the weights lack: an option of the sampled network,
        or conversion with a flag. value: replaces an assumed value.
        """
        if self.option == "ckpt":
            return f"`{option}={value}`" if value else f"give `{option}`"
        flag = " ".join(filter(None, (f"--{option.replace('_', '-')}", value)))
        return f"give {flag} to {CONVERTER}"


class Stopped(Exception):
    """A job stopped on request after it recorded its work. Commands print the text and exit with
    STOPPED.
    """


def as_usage_error(error: BaseException) -> UsageError | None:
    """Convert an error that the user can fix to a UsageError: a missing package, out of memory, a
    full disk or quota. Return a UsageError unchanged, and None for any other error.
    """
    if isinstance(error, UsageError):
        return error
    if isinstance(error, ModuleNotFoundError) and error.name:
        if error.name.partition(".")[0] == __package__:
            return None  # a module of this package: a bug
        return UsageError(
            f"{error.name.partition('.')[0]} is not installed here",
            "activate the environment (source .venv/bin/activate, which make builds), or pip "
            "install -r requirements.txt",
        )
    # By name, since importing torch for its OutOfMemoryError takes seconds.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return UsageError(
            "memory ran out",
            "use a smaller `image_size` or model, fewer pictures at a time, or fewer processes",
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        where = f"{error.filename}: " if error.filename else ""
        return UsageError(f"{where}{error.strerror}", "free some space, or choose another place")
    return None


def shown(value: object, most: int = 80) -> str:
    """Format a value for a message: quoted if it is empty or not printable, and shortened in the
    middle to about `most` characters.
    """
    text = value if isinstance(value, str) and value.isprintable() and value else repr(value)
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 4 :]}"


def require_equal(settings: dict, others: dict, free: Set[str], owner: str, remedy: str) -> None:
    """Raise UsageError about the first setting that differs from `others`.

    free: names that may differ. owner: subject and verb for `others`, such as "rank 0 has".
    remedy: such as "start all ranks with the same flags".
    """
    for name in {**settings, **others}:
        value = settings.get(name, "none")
        other = others.get(name, "none")
        if name not in free and value != other:
            raise UsageError(f"{name} {value}: {owner} {other}", remedy)


@contextmanager
def path_errors(name: str, path: str | Path, remedy: str = "choose another path") -> Iterator[None]:
    """Convert an OSError in the block to a UsageError about the parameter `name` with value
    `path`.
    """
    try:
        yield
    except OSError as error:
        problem = str(error.strerror or error)
        raise UsageError(problem, remedy, parameter=name, value=path) from None


def record(text: str) -> None:
    """Write `text` to torchrun's error file, which torchrun's summary shows. No-op without
    torchrun.
    """
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if place:
        cause = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(place).write_text(json.dumps({"message": cause}))
