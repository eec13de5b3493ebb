"""Errors that a command reports in one line, and its exit statuses."""

import errno
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

USAGE = 2  # a mistake in the user's request
STOPPED = 75  # the job was asked to stop and can be continued: EX_TEMPFAIL of sysexits.h
INTERRUPTED = 130  # Ctrl-C: 128 + SIGINT

PARAMETER = re.compile(r"`([a-z]\w*)(?:=([^`]*))?`")


def printable(text: str, most: int = 1000) -> str:
    """Return `text` on one line. Control characters are escaped; beyond `most` characters
    the middle is left out.
    """
    shown_as_they_are = "\u00a0\u3000"  # spaces
    text = "".join(
        each if each.isprintable() or each in shown_as_they_are else ascii(each)[1:-1]
        for each in text
    )
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 4 :]}"


class UsageError(ValueError):
    """A user's mistake: one printable line that names the parameter and the remedy. The
    messages of several ranks are a line each.

    Parameters stand in backquotes, as in `marked`: "`image_size=17`: must be a multiple
    of 16". Callers in Python read image_size=17. Commands say --image-size 17
    (`by_flags`) and exit with USAGE.
    """

    def __init__(self, *lines: str):
        self.marked = "\n".join(map(printable, lines))
        super().__init__(self.marked)

    def __str__(self):
        return PARAMETER.sub(lambda match: match[0][1:-1], self.marked)

    def by_flags(self, flags: Mapping[str, str] = MappingProxyType({})) -> str:
        """Return the text with flags for parameters. flags: by parameter, where the names
        differ.
        """

        def flag(match):
            name, value = match.groups()
            name = flags.get(name, "--" + name.replace("_", "-"))
            return {None: name, "True": name, "False": f"--no-{name[2:]}"}.get(
                value, f"{name} {value}"
            )

        return PARAMETER.sub(flag, self.marked)


class Stopped(Exception):
    """A job that was asked to stop has recorded its work. Its text goes to the user;
    commands exit with STOPPED.
    """


def as_usage_error(error: BaseException) -> UsageError | None:
    """Return the UsageError for an error that the user can mend: a UsageError itself, a package
    that is not installed, memory of the GPU or the machine that ran out, also while torch is
    loaded, or a write that a disk, a quota or a limit on file sizes refuses. Return None for other
    errors.
    """
    if isinstance(error, UsageError):
        return error
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return UsageError(
            f"{package} is not installed here; activate the environment (source "
            ".venv/bin/activate, which make builds), or pip install -r requirements.txt"
        )
    if isinstance(error, ImportError) and "failed to map segment" in str(error):
        reason = str(error).splitlines()[0]
        return UsageError(
            f"torch cannot be loaded ({reason}); raise the limit on memory (ulimit -v), or "
            "free some"
        )
    # On a CPU torch raises a RuntimeError like any other.
    if isinstance(error, MemoryError) or re.search("out of memory|allocate memory", str(error)):
        return UsageError(
            "memory ran out; use a smaller `image_size` or model, fewer pictures at a time, or "
            "fewer processes"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        where = f"{error.filename}: " if error.filename else ""
        return UsageError(f"{where}{error.strerror}; free some space, or choose another place")
    return None


def shown(value: object, most: int = 80) -> str:
    """Return `value` for a message: as `printable`, in quotes if it would not be seen."""
    return printable(
        value if isinstance(value, str) and value.isprintable() and value else repr(value), most
    )


def require_equal(settings: dict, others: dict, free: Set[str], owner: str, remedy: str) -> None:
    """Raise UsageError about the first of `settings` that differs from `others`; free:
    names that may differ. owner: of the others, with a verb, such as "rank 0 has"; remedy: the
    end of the line, such as "start all ranks with the same flags".
    """
    for name in {**settings, **others}:
        value = settings.get(name, "none")
        other = others.get(name, "none")
        if name not in free and value != other:
            raise UsageError(f"{name} {value}: {owner} {other}; {remedy}")


@contextmanager
def path_errors(name: str, path: str | Path, remedy: str = "choose another path") -> Iterator[None]:
    """Turn an OSError of the block into a UsageError about the parameter `name`, whose
    value is `path`.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"`{name}={path}`: {error.strerror or error}; {remedy}") from None


def record(text: str) -> None:
    """Write `text` to torchrun's file for the cause of a rank's end, which its summary
    shows. Elsewhere a no-op.
    """
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if place:
        cause = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(place).write_text(json.dumps({"message": cause}))
