"""Flags → requests, and errors → one line and an exit status."""

import argparse
import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields

from accel.errors import USAGE, UsageError, as_usage_error, printable
from accel.flags import flag_names
from accel.foreign_flags import nearest, remedy
from accel.request import GridRequest, Request
from accel.settings import implied

# keys of a field that argparse does not know
OWN = "names", "ranks", "ranks_only", "group", "bounds", "convert"


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with exit status 2. All output of the
    command shows a question mark for a character that the terminal cannot show.
    """

    samples = False  # whether people come to it from other repositories' sampling scripts

    def __init__(self, **options):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """As argparse's. An unknown flag is answered by this command's own of that meaning."""
        words = sys.argv[1:] if args is None else list(args)
        flags = self._option_string_actions
        if self.samples and (line := remedy(words, flags)):
            self.error(line)
        parsed, left = self.parse_known_args(words, namespace)
        for action in self._actions:
            if action.nargs is None and getattr(parsed, action.dest, None) == []:  # --gpus=--
                self.error(f"{action.option_strings[0]}: is empty; give a value")
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}{nearest(left, flags)}")
        return parsed

    def error(self, message: str) -> None:
        self.exit(USAGE, f"{self.prog}: {printable(message)}\n")

    def worded(self, error: UsageError) -> str:
        """Return the text of an error with this command's flags for parameters."""
        return error.by_flags(
            {one.dest: one.option_strings[0] for one in self._actions if one.option_strings}
        )


class _Once(argparse.Action):
    """Store a value; refuse a second, different one: of two checkpoints only one can be meant."""

    def __call__(self, parser, namespace, value, option_string=None):
        earlier = getattr(namespace, self.dest)
        if earlier is not None and earlier != value:
            parser.error(
                f"{option_string} {value}: conflicts with {option_string} {earlier}; give one"
            )
        setattr(namespace, self.dest, value)


def add_arguments(
    parser: argparse.ArgumentParser,
    *kinds: type,
    ranks: bool = False,
    leave_out: tuple[str, ...] = (),
) -> dict:
    """Add a flag for every field of the `kinds` of requests, by default a grid's, except
    fields in `leave_out`. Return the groups of --help by name. ranks: for a command of
    many ranks.
    """
    groups = {}
    items = {item.name: item for kind in kinds or (GridRequest,) for item in fields(kind)}
    for item in items.values():
        names = flag_names(item, ranks)
        if item.name in leave_out or not names:
            continue
        argument = {key: value for key, value in item.metadata.items() if key not in OWN}
        if not argument.keys() & {"action", "nargs"}:
            argument |= (
                {"action": _Once}
                if item.default is None and item.type is str
                else {"type": item.type}
            )
        if item.type is not bool and item.default is not None:
            argument["help"] += f" (default: {item.default})"
        group = item.metadata["group"]
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        groups[group].add_argument(*names, dest=item.name, default=item.default, **argument)
    return groups


def request_from(args: argparse.Namespace, kind: type = GridRequest) -> Request:
    """Return the parsed flags as a request of a kind. Raises UsageError for all that can
    be refused without weights.
    """
    known = {item.name for item in fields(kind)}
    request = kind(**{name: value for name, value in vars(args).items() if name in known})
    implied(request)
    return request


def refuse_given(args: argparse.Namespace, kind: type, other: type, why: str) -> None:
    """Raise UsageError about the first given flag that requests of a `kind` have and
    requests of the `other` lack.
    """
    lacking = {item.name for item in fields(kind)} - {item.name for item in fields(other)}
    for item in fields(kind):
        if item.name in lacking and getattr(args, item.name) != item.default:
            raise UsageError(f"`{item.name}`: {why}")


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
