"""How a command ends when it does not succeed: the errors it reports in one line, and its exit statuses."""

import errno
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

USAGE = 2  # a mistake in what the user asked for
STOPPED = 75  # the job was asked to stop and can be continued: EX_TEMPFAIL of sysexits.h
INTERRUPTED = 130  # Ctrl-C: 128 + SIGINT

PARAMETER = re.compile(r"`([a-z]\w*)(?:=([^`]*))?`")


def printable(text: str, most: int = 1000) -> str:
    """Return `text` on one line. Control characters are escaped; beyond `most` characters the middle is left out."""
    if not text.isprintable():
        shown = (one if one.isprintable() or one in "\u00a0\u3000" else ascii(one)[1:-1] for one in text)
        text = "".join(shown)
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 4 :]}"


class UsageError(ValueError):
    """A mistake in what the user asked for: one printable line that names the parameter and the remedy. The messages
    of several ranks are a line each.

    Parameters stand in backquotes: "`image_size=17`: must be a multiple of 16". Callers in Python read image_size=17.
    Commands say --image-size 17 (`by_flags`) and exit with USAGE.
    """

    def __init__(self, *lines: str):
        super().__init__("\n".join(map(printable, lines)))

    def __str__(self):
        return PARAMETER.sub(lambda found: found[0][1:-1], self.marked)

    @property
    def marked(self) -> str:
        """The text with its backquotes."""
        return self.args[0]

    def by_flags(self, flags: Mapping[str, str] = MappingProxyType({})) -> str:
        """The text with flags for parameters; flags: of those that are not named like their parameter."""

        def flag(found):
            name, value = found.groups()
            name = flags.get(name, "--" + name.replace("_", "-"))
            return {None: name, "True": name, "False": f"--no-{name[2:]}"}.get(value, f"{name} {value}")

        return PARAMETER.sub(flag, self.marked)


class Stopped(Exception):
    """The job was asked to stop and has recorded its work; the text goes to the user. Commands exit with STOPPED."""


def out_of_memory(error: BaseException) -> UsageError | None:
    """The line for an error by which Python or torch says that memory, a GPU's or the machine's, has run out; None for
    other errors. On a CPU torch's is a RuntimeError like any other."""
    if isinstance(error, MemoryError) or re.search("out of memory|allocate memory", str(error)):
        return UsageError(
            "memory ran out; use a smaller `image_size` or model, fewer pictures at a time, or fewer processes"
        )
    return None


def full_disk(error: BaseException) -> UsageError | None:
    """Return the line for an error by which a disk, a quota or a limit on file sizes refuses a write, else None."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        where = f"{error.filename}: " if error.filename else ""
        return UsageError(f"{where}{error.strerror}; free some space, or choose another place")
    return None


def shown(value: object, most: int = 80) -> str:
    """`value` as a message shows it: as `printable`, and text that would not be seen, in quotes."""
    return printable(value if isinstance(value, str) and value.isprintable() and value else repr(value), most)


@contextmanager
def path_errors(name: str, path: str | Path, remedy: str = "choose another path") -> Iterator[None]:
    """Turn an OSError of the block into a UsageError about `path`, which is the parameter `name`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"`{name}={path}`: {error.strerror or error}; {remedy}") from None


def record(text: str) -> None:
    """Write `text` where torchrun looks for the cause of a rank's end: its summary shows it. Elsewhere do nothing."""
    if place := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        cause = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(place).write_text(json.dumps({"message": cause}))
