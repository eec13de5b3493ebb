"""Command-line flags from the option table; errors as one line with an exit status."""

import argparse
import difflib
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import accel
from accel import launch
from accel.config.options import DEFAULTS, FID, GRID, OPTIONS, Options, label
from accel.config.rules import Request
from accel.errors import USAGE, UsageError, Worded, as_usage_error, record


class _Printing(logging.Handler):
    """Print messages to the current standard output. If its reader has exited (`| head -1`), the
    command continues silently.
    """

    def __init__(self, flags: Callable[[], Mapping[str, str]]):
        super().__init__()
        self.flags = flags

    def emit(self, record: logging.LogRecord) -> None:
        message: Any = record.msg
        worded = isinstance(message, Worded)
        line = message.by_flags(self.flags()) if worded else self.format(record)
        try:
            print(line, flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_notices(flags: Callable[[], Mapping[str, str]] = dict) -> None:
    """Print the package's log messages, for commands; a Python program configures logging itself.
    flags: returns flags by parameter, if they differ in name.
    """
    logger = logging.getLogger("accel")
    logger.handlers = [_Printing(flags)]
    logger.propagate = False
    logger.setLevel(logging.INFO)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help that does not break flags at hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        import textwrap  # lazy: only for --help

        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line with exit status 2. It also configures output:
    log messages are printed, and characters that the terminal cannot encode become "?".
    """

    def __init__(self, **options):
        super().__init__(formatter_class=_Help, allow_abbrev=False, **options)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        print_notices(self.flags)
        self.add_argument(
            "--version",
            action="version",
            version=f"%(prog)s {accel.__version__}",
            help="print the version",
        )

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse like argparse; the error for an unknown flag suggests the nearest flag."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = next((word for word in unknown if word.startswith("--")), "").partition("=")[0]
            near = nearest(flag, self._option_string_actions)
            suggestion = f"; did you mean {' or '.join(near)}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{suggestion}")
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}\n")

    def worded(self, error: UsageError) -> str:
        """Format an error with this command's flags in place of parameters."""
        return error.by_flags(self.flags())

    def flags(self) -> dict[str, str]:
        """Return the main flag of each parameter."""
        actions = [action for action in self._actions if action.option_strings]
        return {action.dest: action.option_strings[0] for action in actions}


def nearest(flag: str, flags: Collection[str]) -> list[str]:
    """Suggest flags for a misspelt one: up to three with all its words, else the most similar."""
    words = flag.strip("-").split("-")
    with_words = [each for each in flags if flag and all(word in each for word in words)]
    return with_words[:3] or difflib.get_close_matches(flag, flags, 1, 0.75)


class RankParser(OneLineParser):
    """A parser of which only rank 0 prints. All other ranks exit later, since a launcher kills all
    ranks when one exits.
    """

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if not launch.IS_FIRST_RANK:
            time.sleep(2)
            message = None
        elif message:
            record(message.rstrip())
        super().exit(status, message)


def positive(text: str) -> int:
    """Parse an integer from 1 to 1,000,000, for argparse."""
    value = int(text)
    if not 1 <= value <= 10**6:
        raise argparse.ArgumentTypeError(f"{text}: must be from 1 to 1,000,000")
    return value


def add_arguments(
    parser: argparse.ArgumentParser,
    *jobs: str,
    ranks: bool = False,
    exclude: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Add a flag for each option of `jobs` (default: a grid) that is not in `exclude`; a flag that
    is not given becomes None. Return the groups of --help by name. ranks: the command runs on
    several ranks.
    """
    groups: dict[str, Any] = {}
    for option in OPTIONS.values():
        names = option.flag_names(ranks)
        is_in_jobs = {*option.jobs} & {*(jobs or (GRID,))}
        if not is_in_jobs or option.name in exclude or not names:
            continue
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        text = option.help
        if option.name in DEFAULTS and option.type is not bool:
            text += f" (default: {option.default})"
        add: Callable = partial(
            groups[option.group].add_argument, *names, dest=option.name, default=None, help=text
        )
        if option.action is not None:
            add(action=option.action)
        else:
            add(
                type=None if option.type is label else option.type,
                choices=option.choices or None,
                nargs=option.several,
                metavar=option.metavar,
            )
    return groups


def request_from(args: argparse.Namespace) -> Request:
    """Open the request of parsed flags. Raises UsageError for errors that need no weights."""
    given = {name: value for name, value in vars(args).items() if name in OPTIONS}
    options = Options(**given)
    for name in options:
        if options.job not in OPTIONS[name].jobs:
            raise UsageError(WRONG_JOB_ERRORS[options.job], parameter=name)
    if options.get("quiet"):
        logging.getLogger("accel").setLevel(logging.WARNING)
    return Request.open(options)


# Problem and remedy for an option of the other job.
WRONG_JOB_ERRORS = {
    GRID: "is for an FID job, and this makes one grid at `output`; add `num_fid_samples`, or drop "
    "it",
    FID: "has no meaning with `num_fid_samples`, which draws its labels and fills a folder; drop "
    "one of them",
}


@contextmanager
def user_errors(parser: OneLineParser) -> Iterator[None]:
    """Print a user's error, see `as_usage_error`, as one line and exit with status 2."""
    try:
        yield
    except Exception as error:
        usage_error = as_usage_error(error)
        if usage_error is None:
            raise
        parser.exit(USAGE, f"{parser.prog}: {parser.worded(usage_error)}\n")
