"""How a command ends when it does not succeed: the errors it reports in one line, and its exit statuses."""

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

USAGE = 2  # a mistake in what the user asked for
STOPPED = 75  # the job was asked to stop and can be continued: EX_TEMPFAIL of sysexits.h
INTERRUPTED = 130  # Ctrl-C: 128 + SIGINT

PARAMETER = re.compile(r"`([a-z]\w*)(?:=([^`]*))?`")


class UsageError(ValueError):
    """A mistake in what the user asked for: one line that names the parameter and the remedy.

    Parameters stand in backquotes: "`image_size=17`: must be a multiple of 16". Callers in Python read image_size=17.
    Commands say --image-size 17 (`by_flags`) and exit with USAGE.
    """

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


def shown(value: object, most: int = 80) -> str:
    """`value` as a message shows it: on one line, without control characters, and not longer than `most`."""
    text = value if isinstance(value, str) and value.isprintable() and value else repr(value)
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 4 :]}"


@contextmanager
def path_errors(name: str, path: str | Path, remedy: str = "choose another path") -> Iterator[None]:
    """Turn an OSError of the block into a UsageError about `path`, which is the parameter `name`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"`{name}={path}`: {error.strerror or error}; {remedy}") from None


def say_last(text: str) -> None:
    """Print `text` once more when torchrun has ended: of the forty lines that it prints of a failed rank, none says
    why. Elsewhere do nothing."""
    if "TORCHELASTIC_RUN_ID" in os.environ and text:
        # An ended process whose parent still reads its pipes is a zombie: it exists, and this holds such a pipe.
        wait = 'while grep -qs "^State:.[^ZX]" /proc/$1/status; do sleep 0.05; done; printf "%s\\n" "$2" >&2'
        with suppress(OSError):
            # A session of its own: what ends torchrun's processes does not end this one.
            subprocess.Popen(["sh", "-c", wait, "sh", str(os.getppid()), text], start_new_session=True)
