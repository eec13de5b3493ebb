"""Layouts that were chosen earlier, by situation, in the user's cache folder."""

import json
from contextlib import suppress
from pathlib import Path

from accel.files import atomic_write, cache_folder, read_json
from accel.parallel.layouts import EXCHANGES, Layout


def file() -> Path:
    """Where they are kept."""
    return cache_folder() / "plans.json"


def known(situation: str) -> tuple[Layout, str] | None:
    """(layout, why) chosen in `situation`, or None. An absent or damaged file has none, a damaged entry is none."""
    entry = _read().get(situation)
    return entry and (Layout(*entry[0]), entry[1])


def keep(situation: str, layout: Layout, reason: str) -> None:
    """Keep a choice. Where nothing can be written, layouts are timed at every start."""
    content = {**_read(), situation: [layout, reason]}
    with suppress(OSError):
        file().parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file(), "w", through_link=False) as out:
            json.dump(content, out, indent=1)


def _read():
    try:
        return {situation: entry for situation, entry in read_json(file()).items() if _is_choice(entry)}
    except (OSError, ValueError):
        return {}


def _is_choice(entry):
    match entry:
        case [[int(rows), int(tokens), str(exchange), int(weights)], str()]:  # a Layout, as JSON has it
            return min(rows, tokens, weights) >= 1 and exchange in EXCHANGES
    return False
