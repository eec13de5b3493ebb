"""Time per phase, and a progress bar of steps."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


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

    def __str__(self):
        phases = (f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())
        return " · ".join([*phases, f"total {self.ended - self.began:.2f} s"])


@contextmanager
def step_bar(total: int, device: torch.device, **options) -> Iterator[Callable[..., None]]:
    """Show a tqdm bar of `total` steps. Yields on_step(index[, x]), to be called when a step has
    been queued. The bar follows the device's progress without synchronising.
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
            event.record(torch.cuda.current_stream(device))  # maybe not the current GPU
            pending.append((event, index + 1))
            while pending and pending[0][0].query():
                bar.update(pending.pop(0)[1] - bar.n)

        yield queued
        for event, done in pending:
            event.synchronize()
            bar.update(done - bar.n)
