"""OPTIONS as flags, and errors as one line with an exit status."""

import argparse
import difflib
import io
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from accel.config import rules
from accel.config.options import FID, GRID, OPTIONS, Option, Options, label
from accel.errors import USAGE, UsageError, Worded, as_usage_error, record
from accel.launch import signals


class _Printing(logging.Handler):
    """Print each message as a line of standard output, whichever that is at the time. Without a
    reader, as after `| head -1`, the command goes on in silence: its work is not lost.
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
    """Print what the package logs. A command does so; elsewhere Python's logging shows
    warnings, and the caller may configure it. flags: returns those whose names differ from their
    parameters'.
    """
    logger = logging.getLogger("accel")
    logger.handlers = [_Printing(flags)]
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
        super().__init__(formatter_class=_Help, allow_abbrev=False, **options)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        print_notices(self.flags)

    def parse_args(  # type: ignore[override]
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
            near = nearest(flag, self._option_string_actions)
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(left)}{meant}")
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}\n")

    def worded(self, error: UsageError) -> str:
        """Return the text of an error with this command's flags for parameters."""
        return error.by_flags(self.flags())

    def flags(self) -> dict[str, str]:
        """Return the main flag of each parameter."""
        actions = [action for action in self._actions if action.option_strings]
        return {action.dest: action.option_strings[0] for action in actions}


def nearest(flag: str, flags: Iterable[str]) -> list[str]:
    """Return the flags that a user may have meant: of almost the same letters, else the few with
    all words of `flag`, whose plural counts, else the one of the most similar letters.
    """
    flags = [each for each in flags if each.startswith("--")]
    words = {word for word in re.split(r"[-_]", flag) if word}
    holding = [each for each in flags if words and all(_has_word(each, word) for word in words)]
    close = difflib.get_close_matches(flag, flags, 1, 0.9)
    if close or not 1 <= len(holding) <= 3:
        return close or difflib.get_close_matches(flag, flags, 1, 0.75)
    return holding


def _has_word(flag: str, word: str) -> bool:
    """Return whether a flag has a word, in the singular or plural."""
    stems = {re.escape(word), re.escape(word.rstrip("s"))}
    return re.search(rf"-({'|'.join(sorted(stems))})(s|es)?(-|$)", flag) is not None


class RankParser(OneLineParser):
    """Rank 0 alone prints. The others exit later, since a launcher ends all ranks as soon
    as one exits.
    """

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if not signals.IS_FIRST_RANK:
            time.sleep(2)
            message = None
        elif message:
            record(message.rstrip())
        super().exit(status, message)


def positive(text: str) -> int:
    """Convert a whole number from 1 to a million, for argparse."""
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
    """Add a flag for every option of `jobs`, by default of a grid, except those in
    `exclude`. A flag that is not given leaves None. Return the groups of --help by name. ranks:
    for a command of many ranks.
    """
    groups: dict[str, Any] = {}
    for option in OPTIONS.values():
        names = option.flag_names(ranks)
        wanted = {*option.jobs} & {*(jobs or (GRID,))}
        if not wanted or option.name in exclude or not names:
            continue
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        groups[option.group].add_argument(*names, dest=option.name, **_argument(option))
    return groups


def _argument(option: Option) -> dict[str, Any]:
    """Return argparse's keywords for an option."""
    argument: dict[str, Any] = {"help": option.help, "default": None}
    if option.default is not None and option.type is not bool:
        argument["help"] += f" (default: {option.default})"
    if option.action is not None:
        return argument | {"action": option.action}
    if option.type is not label:
        argument["type"] = option.type
    for name, value in (("choices", option.choices), ("nargs", option.several)):
        if value:
            argument[name] = value
    return argument | {"metavar": option.metavar}


def options_from(args: argparse.Namespace) -> Options:
    """Return the parsed flags as options. Raises UsageError for all that can be refused without
    weights.
    """
    given = {name: value for name, value in vars(args).items() if name in OPTIONS}
    options = Options(**given)
    for name in options:
        if options.job not in OPTIONS[name].jobs:
            raise UsageError(WRONG_JOB_ERRORS[options.job], parameter=name)
    rules.check(options)
    return options


# Problem and remedy of an option that the other job has.
WRONG_JOB_ERRORS = {
    GRID: "is for an FID job, and this makes one grid at `output`; add `num_fid_samples`, or drop "
    "it",
    FID: "has no meaning with `num_fid_samples`, which draws its labels and fills a folder; drop "
    "one of them",
}


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
