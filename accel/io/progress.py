"""Time per phase, and the progress of pictures, steps and downloads."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from tqdm import tqdm

LINE_INTERVAL = 30.0  # seconds between lines off a terminal, unless TQDM_MININTERVAL is set


class Stopwatch:
    """Wall-clock seconds per phase; the device is synchronised at the end of each phase.

    The total is from the creation of the stopwatch to the end of the last phase, and includes
    waiting for other ranks between phases.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = {}
        self.began = time.perf_counter()
        self.ended = self.began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.ended = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + self.ended - start

    @property
    def phases(self) -> dict[str, float]:
        """The seconds of each phase, and the total."""
        return {**self.seconds, "total": self.ended - self.began}

    def __str__(self):
        return " · ".join(f"{name} {seconds:.2f} s" for name, seconds in self.phases.items())


class ProgressLines(tqdm):
    """Progress for log files: every 30 s a whole line, such as "1,200 of 50,000 pictures, 4.3/s,
    3 h left", and none at start and end.
    """

    def __init__(self, **options):
        options.setdefault("mininterval", float(os.environ.get("TQDM_MININTERVAL", LINE_INTERVAL)))
        # miniters: tqdm's monitor prints no line between two updates
        super().__init__(miniters=1, **options)

    def display(self, msg=None, pos=None) -> None:
        if self.n > self.initial:
            print(progress_line(self.format_dict), file=self.fp, flush=True)

    def close(self) -> None:
        self.disable = True


def progress_line(state: Mapping[str, Any]) -> str:
    """Format the progress as text. state: tqdm's `format_dict`."""
    done = state["n"]
    total = state["total"]
    rate = state["rate"] or (done - state["initial"]) / state["elapsed"]
    count: Callable[..., str] = "{:,}".format
    unit = f" {state['unit']}s"
    speed = f"{float(f'{rate:.2g}'):,g}"
    if state["unit_scale"]:  # bytes
        count = tqdm.format_sizeof
        unit = state["unit"]
        speed = count(rate, unit)
    name = state["prefix"] and f"{state['prefix']}: "
    if not total:
        return f"{name}{count(done)}{unit}, {speed}/s"
    left = _duration((total - done) / rate)
    return f"{name}{count(done)} of {count(total)}{unit}, {speed}/s, {left} left"


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def progress(show: bool = True, **options) -> tqdm:
    """Return a bar on a terminal or in a notebook, else `ProgressLines`, on standard error; neither
    unless `show`. TQDM's environment variables are honoured. options: of tqdm.
    """
    if not show:  # disable=False would override TQDM_DISABLE
        options["disable"] = True
    redraws = sys.stderr.isatty() or "ipykernel" in sys.modules
    return (tqdm if redraws else ProgressLines)(**options)


@contextmanager
def step_bar(total: int, device: torch.device, show: bool = True) -> Iterator[Callable[..., Any]]:
    """Show the progress of `total` steps. Yields on_step(index[, x]), to be called when a step has
    been queued. The bar follows the device's progress without synchronising.
    """
    with progress(show, total=total, unit="step") as bar:
        if device.type != "cuda":
            yield lambda index, x=None: bar.update(index + 1 - bar.n)
            return
        pending: list[tuple[torch.cuda.Event, int]] = []

        def queued(index, x=None):
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))  # maybe not the current GPU
            pending.append((event, index + 1))
            while pending and pending[0][0].query():
                bar.update(pending.pop(0)[1] - bar.n)

        yield queued
        for event, done in pending:
            event.synchronize()
            bar.update(done - bar.n)
