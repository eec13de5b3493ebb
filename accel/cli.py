"""The flags of a Config, and errors as one line with an exit status."""

import argparse
import difflib
import io
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields
from typing import Any, TypeVar

from accel import signals
from accel.config import Config, Grid, Job
from accel.errors import USAGE, UsageError, as_usage_error, printable, record
from accel.flags import base_type, flag_names

AnyJob = TypeVar("AnyJob", bound=Job)
# keys of a field that argparse does not know
OWN = "names", "ranks", "ranks_only", "group", "bounds", "convert"


class _Printing(logging.Handler):
    """Print each message as a line of standard output, whichever that is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record))


def print_notices() -> None:
    """Print what the package logs. A command does so; elsewhere Python's logging shows
    warnings, and the caller may configure it.
    """
    logger = logging.getLogger("accel")
    logger.handlers = [_Printing()]
    logger.propagate = False
    logger.setLevel(logging.INFO)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help whose names with hyphens stay whole, to be copied."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        import textwrap  # --help alone needs it

        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with exit status 2. All output of the
    command shows a question mark for a character that the terminal cannot show. The
    package's notices are part of that output.
    """

    def __init__(self, **options):
        super().__init__(formatter_class=_Help, **options)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        print_notices()

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse the arguments as argparse does. The error about an unknown flag names the
        nearest one.
        """
        parsed, left = self.parse_known_args(args, namespace)
        for action in self._actions:
            if action.nargs is None and getattr(parsed, action.dest, None) == []:  # --gpus=--
                self.error(f"{action.option_strings[0]}: is empty; give a value")
        if left:
            flag = next((word for word in left if word.startswith("--")), "").partition("=")[0]
            near = difflib.get_close_matches(flag, self._option_string_actions, 1, 0.75)
            meant = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(left)}{meant}")
        return parsed

    def error(self, message: str) -> None:
        self.exit(USAGE, f"{self.prog}: {printable(message)}\n")

    def worded(self, error: UsageError) -> str:
        """Return the text of an error with this command's flags for parameters."""
        return error.by_flags(
            {
                action.dest: action.option_strings[0]
                for action in self._actions
                if action.option_strings
            }
        )


class RankParser(OneLineParser):
    """Rank 0 alone prints. The others exit later, since a launcher ends all ranks as soon
    as one exits.
    """

    def exit(self, status: int = 0, message: str | None = None) -> None:
        if not signals.IS_FIRST_RANK:
            time.sleep(2)
            message = None
        elif message:
            record(message.rstrip())
        super().exit(status, message)


def add_arguments(
    parser: argparse.ArgumentParser,
    *job_types: type,
    ranks: bool = False,
    leave_out: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Add a flag for every option of Config and of the jobs `job_types`, by default a grid's,
    except those in `leave_out`. Return the groups of --help by name. ranks: for a command of
    many ranks.
    """
    groups = {}
    items = {}
    for job_type in (Config, *(job_types or (Grid,))):
        items |= {item.name: item for item in fields(job_type) if "help" in item.metadata}
    for item in items.values():
        names = flag_names(item, ranks)
        if item.name in leave_out or not names:
            continue
        group = item.metadata["group"]
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        groups[group].add_argument(*names, dest=item.name, default=item.default, **_argument(item))
    return groups


def _argument(item: Field) -> dict[str, Any]:
    """Return argparse's keywords for an option."""
    argument = {key: value for key, value in item.metadata.items() if key not in OWN}
    if not argument.keys() & {"action", "nargs"}:
        argument["type"] = base_type(item)
    if base_type(item) is not bool and item.default is not None:
        argument["help"] += f" (default: {item.default})"
    return argument


def job_from(args: argparse.Namespace, job_type: type[AnyJob] = Grid) -> AnyJob:
    """Return the parsed flags as a job of a type. Raises UsageError for all that can be
    refused without weights.
    """
    names = {item.name for item in (*fields(Config), *fields(job_type))}
    job = job_type.of(**{name: value for name, value in vars(args).items() if name in names})
    job.check()
    return job


def refuse_given(args: argparse.Namespace, job_type: type, other: type, reason: str) -> None:
    """Raise UsageError about the first given flag of an option that jobs of `job_type` have
    and jobs of the `other` lack.
    """
    theirs = {item.name for item in fields(other)}
    for item in fields(job_type):
        if item.name not in theirs and getattr(args, item.name) != item.default:
            raise UsageError(f"`{item.name}`: {reason}")


@contextmanager
def user_errors(parser: OneLineParser) -> Iterator[None]:
    """Turn a UsageError, too little memory and a full disk into a line and status 2."""
    try:
        yield
    except Exception as error:
        mistake = as_usage_error(error)
        if mistake is None:
            raise
        parser.exit(USAGE, f"{parser.prog}: {parser.worded(mistake)}\n")
