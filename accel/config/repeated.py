"""Read the settings in a picture of `sample.py` and check them as a user's options (--like).

A file that a picture names is never opened or fetched: the user gives it, unless its name is a
published one. Imports no torch.
"""

import io
import json
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

from accel.config.options import (
    DEFAULT,
    FAMILY,
    GRID,
    JOB,
    MODEL,
    OPTIONS,
    SAMPLED,
    SPEED,
    USER,
    Options,
)
from accel.errors import InputRef, UsageError, path_errors, shown
from accel.families import published_names
from accel.io.filesystem import read_small
from accel.io.output import TEXT_KEY

MAX_BYTES = 2**28  # of a picture's file
# The options in a picture: none is a path. Seed, grid and picture are recorded for each file.
REPEATED = {
    name
    for name, option in OPTIONS.items()
    if GRID in option.jobs and option.group in (SAMPLED, SPEED)
} - {"grids", "like", "parallel", "seed_list", "tf32"} | {"num_heads", "weights_entry"}
FILE_OPTIONS = "ckpt", "guide", "vae"
# Option → recorded options that it replaces too.
REPLACED = {"seed_list": {"seed"}, "tf32": {"precision"}, "sampler": {"eta"}}


class Repeated(NamedTuple):
    """The settings in a picture.

    by_origin: checked values without those that flags override. digests: of weights, guide and
    decoder, by option. machine: version, torch, GPU and ranks as text. grid: number of grids
    before it in its random stream. picture: its index in the labels; None for a grid.
    """

    given: InputRef = InputRef("", "like")
    by_origin: tuple[tuple[str, Options], ...] = ()
    digests: Mapping[str, Any] = {}
    machine: tuple[str, ...] = ()
    grid: int = 0
    picture: int | None = None


def read_picture(options: Options) -> tuple[Options, Repeated]:
    """Read the picture that options name. Return the options, completed by published names of its
    files, and its settings. Raises UsageError.
    """
    given = InputRef(options["like"], "like")
    if "config" in options:
        problem = f"conflicts with `like={given.name}`"
        raise UsageError(problem, "give its files by flags", parameter="config")
    try:
        record = _read_record(given)
        repeated = _checked(given, record, options)
        named = {name: str(each["name"]) for name, each in record["files"].items() if each["given"]}
    except UsageError:
        raise
    except Exception as error:  # foreign files can raise any exception
        reason = shown(str(error) or type(error).__name__)
        problem = f"contains no settings of this version of sample.py ({reason})"
        raise given.error(problem, "give a PNG that it wrote") from None
    published = {"ckpt": published_names(), "vae": {"ema", "mse", "pixels"}}
    for name in FILE_OPTIONS:
        if name in named and name not in options:
            if named[name] not in published.get(name, ()):
                raise given.error(f"was made with `{name}={shown(named[name])}`", "give that file")
            options = options.changed(**{name: named[name]})
    return options, repeated


def _read_record(given: InputRef) -> dict[str, Any]:
    from PIL import Image  # lazy import: only for --like

    with path_errors("like", given.name):
        content = read_small(given.name, MAX_BYTES)
    with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
        text = image.info[TEXT_KEY]
    return json.loads(text)


def _checked(given: InputRef, record: Mapping[str, Any], options: Options) -> Repeated:
    """Check the types and bounds of a record. options: the user's."""
    replaced = {*options, *chain(*(REPLACED[name] for name in REPLACED if name in options))}
    groups: dict[str, dict[str, Any]] = {}
    for name, entry in record["settings"].items():
        if name not in REPEATED:
            raise ValueError(f"unknown setting {name}")
        if name not in replaced:
            known = entry["origin"] in (USER, JOB, MODEL, FAMILY, DEFAULT)
            groups.setdefault(entry["origin"] if known else given.name, {})[name] = entry["value"]
    try:
        by_origin = tuple((origin, Options(**values)) for origin, values in groups.items())
        grid = OPTIONS["grids"].checked(record["grid"] + 1) - 1
    except UsageError as error:
        raise given.error(error.marked) from None
    picture = record["picture"]
    if picture not in (None, *range(len(record["settings"]["labels"]["value"]))):
        raise ValueError(f"no picture {picture}")
    return Repeated(
        given,
        by_origin,
        {name: each["digest"] for name, each in record["files"].items()},
        tuple(map(str, record["machine"])),
        0 if {"seed_list", "grids"} & {*options} else grid,
        None if "labels" in options else picture,
    )
