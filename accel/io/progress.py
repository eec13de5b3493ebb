"""Seconds by phase, and a bar of a run's steps."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Wall-clock seconds by phase; the device's queue is drained at each end.

    The total runs from the making of the stopwatch to the end of the last phase: it includes a
    rank's waits between phases.
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

    def __str__(self):
        phases = (f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())
        return " · ".join([*phases, f"total {self.ended - self.began:.2f} s"])


@contextmanager
def step_bar(total: int, device: torch.device, **options) -> Iterator[Callable[..., None]]:
    """Show a tqdm bar of `total` steps. Yields on_step(index[, x]), to call when a step
    has been queued; the bar advances when the device has finished it, and nothing waits.
    """
    from tqdm import tqdm

    with tqdm(total=total, unit="step", **options) as bar:
        if device.type != "cuda":

            def done_at_once(index, x=None):
                bar.update(index + 1 - bar.n)

            yield done_at_once
            return
        pending: list[tuple[torch.cuda.Event, int]] = []

        def queued(index, x=None):
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))  # the current GPU may be another
            pending.append((event, index + 1))
            while pending and pending[0][0].query():
                bar.update(pending.pop(0)[1] - bar.n)

        yield queued
        for event, done in pending:
            event.synchronize()
            bar.update(done - bar.n)
