"""Layouts that were chosen earlier, by situation, in the user's cache folder."""

import json
from contextlib import suppress
from pathlib import Path

from accel.files import atomic_write, cache_folder, read_json
from accel.parallel.layouts import OFF, Layout, parse


def file() -> Path:
    """Return the path of the file of kept layouts."""
    return cache_folder() / "plans.json"


def known(situation: str) -> tuple[Layout, str] | None:
    """Return the layout that was chosen in `situation` and the reason, or None. A damaged file or entry counts as
    none."""
    with suppress(KeyError, TypeError, ValueError):  # a UsageError is a ValueError
        text, reason = _read()[situation]
        return OFF if text == "off" else parse(f"{text}"), f"{reason}"
    return None


def keep(situation: str, layout: Layout, reason: str) -> None:
    """Keep a choice. Where nothing can be written, layouts are timed at every start."""
    choices = {**_read(), situation: ["off" if layout == OFF else str(layout), reason]}
    with suppress(OSError):
        file().parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file(), "w", through_link=False) as out:
            json.dump(choices, out, indent=1)


def _read():
    try:
        return read_json(file())
    except (OSError, ValueError):
        return {}
