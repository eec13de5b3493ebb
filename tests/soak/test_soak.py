"""Networks built, captured, run, freed and built again in random order, beside foreign
kernels: always the same bits.

    SOAK_SECONDS=600 SOAK_SEED=0 SOAK_LOG=output/soak.json pytest -m soak

Freed memory is filled with NaN before anybody else gets it. In the second half of the
time other tensors take most of the GPU's memory. The log says what was done last, if a
kernel fails.
"""

import gc
import json
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import fill
from networks import evaluate, network_of, sample

from accel import accelerate
from accel.families.dit.network import DiT
from accel.io.filesystem import atomic_write
from accel.sampling.ancestral import Ancestral

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(0),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
HEADROOM = 4 << 30  # bytes that are left free in the second half
LIVE = 4  # networks at a time
TURNS = 10  # launches of each between two synchronisations


class Case(NamedTuple):
    """A network and what it is run on."""

    tier: str
    width: int
    heads: int
    side: int  # of a latent
    batch_rows: int
    captured: bool = True


CASES = [
    *(Case(tier, 1152, 16, 64, rows) for tier in ("fp16", "exact") for rows in (16, 4, 2)),
    *(
        Case(tier, 1152, 16, 32, 2, captured)
        for tier in ("fp16", "bf16", "exact")
        for captured in (True, False)
    ),
    Case("fp16", 1152, 16, 16, 2),
    Case("exact", 384, 6, 32, 4),
    Case("fp16", 768, 12, 32, 8),
]


def plain(case: Case) -> DiT:
    """The same weights at every call."""
    with torch.device("cuda"):
        model = DiT(input_size=case.side, hidden_size=case.width, depth=2, num_heads=case.heads)
    return fill(model).requires_grad_(False)


class Running:
    """A network with its inputs: `launches` are functions that queue work and give a tensor."""

    def __init__(self, case: Case):
        self.case = case
        n = case.batch_rows
        self.network = network_of(plain(case), case.tier)
        if case.captured:
            self.fast = accelerate(plain(case), case.tier)
            self.network = self.fast.network
        generator = torch.Generator("cuda").manual_seed(1)
        self.x = torch.randn(n, 4, case.side, case.side, generator=generator, device="cuda")
        self.t = torch.randint(0, 1000, (n // 2,), generator=generator, device="cuda").repeat(2)
        self.y = torch.tensor(
            [207, 360, 387, 974, 88, 979, 417, 279][: n // 2] + [1000] * (n // 2), device="cuda"
        )
        self.process = Ancestral(3)

    def evaluate(self) -> torch.Tensor:
        if not self.case.captured:
            return evaluate(self.network, self.x, self.t, self.y, 4.0)
        return self.fast.forward_with_cfg(self.x, self.t, self.y, 4.0)

    def sample(self) -> torch.Tensor:
        torch.manual_seed(2)
        half = len(self.x) // 2
        return sample(self.network, self.process, self.x[:half], self.y[:half], 4.0, 1000)


def foreign() -> dict[str, Callable[[], torch.Tensor]]:
    """Kernels that are not ours, by name. The compiled network is compiled at its first
    call, in the middle of the run, and torch.compile then frees what it can.
    """
    case = Case("fp16", 1152, 16, 32, 4)
    model = plain(case).half()
    running = torch.Generator("cuda").manual_seed(3)
    x = torch.randn(4, 4, 32, 32, generator=running, device="cuda").half()
    t = torch.full((4,), 500, device="cuda")
    y = torch.arange(4, device="cuda")
    compiled = torch.compile(model, mode="max-autotune", dynamic=False)
    layer = torch.nn.Conv2d(
        128, 128, 3, padding=1, device="cuda", dtype=torch.float16
    ).requires_grad_(False)
    picture = torch.randn(1, 128, 256, 256, generator=running, device="cuda").half()
    wide = torch.randn(64, 32768, generator=running, device="cuda")
    return {
        "eager": lambda: model(x, t, y),
        "convolution": lambda: layer(picture),
        "float32 GEMM": lambda: wide @ wide.t(),
        "compiled": lambda: compiled(x, t, y).clone(),
    }


def poison() -> None:
    """Fill with NaN what torch's allocator holds free: an allocation that it has no room
    for ends a size.
    """
    held = []
    for size in (1 << 28, 1 << 24, 1 << 21, 1 << 17, 1 << 11):
        before = torch.cuda.memory_reserved()
        while torch.cuda.memory_reserved() == before:
            held.append(torch.full((size // 4,), torch.nan, device="cuda"))


class Soak:
    """What is alive, what it must give, and the record of what was done."""

    def __init__(self, seed: int, log: Path):
        self.random = random.Random(seed)
        self.log = log
        self.live = []
        self.want = {}
        self.others = foreign()
        self.done = Counter()
        self.last = deque(maxlen=40)
        self.about = dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, seed=seed)

    def write(self, **more) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.log, "w") as out:
            json.dump(
                {**self.about, "done": self.done, "last": list(self.last), **more}, out, indent=1
            )

    def note(self, what: str, case: Case | None = None) -> None:
        self.done[what] += 1
        self.last.append(f"{what} {tuple(case)}" if case else what)

    def build(self) -> None:
        case = self.random.choice(CASES)
        self.note("build", case)
        self.live.append(Running(case))
        self.launch(self.live[-1:])

    def free(self) -> None:
        """Free a network, its graphs in flight, then poison its memory; sometimes the
        driver gets it back first.
        """
        one = self.live.pop(self.random.randrange(len(self.live)))
        self.note("free", one.case)
        one.evaluate()
        del one
        gc.collect()
        if self.random.random() < 0.5:
            torch.cuda.empty_cache()
        poison()

    def launch(self, networks: list[Running]) -> None:
        """Queue launches of `networks` and of foreign kernels in turns, then compare all
        bits with the first results.
        """
        names = self.random.sample(list(self.others), 2)
        self.note("launch")
        self.last.append(", ".join([*names, *(str(tuple(one.case)) for one in networks)]))
        results = []
        for _ in range(TURNS):
            results += [((one.case, "evaluate"), one.evaluate()) for one in networks]
            results += [(name, self.others[name]()) for name in names]
        results += [((one.case, "sample"), one.sample()) for one in networks]
        for key, got in results:
            want = self.want.setdefault(key, got.cpu())
            assert got.isfinite().all() and torch.equal(got.cpu(), want), (
                f"{key}: other bits than at first"
            )
        self.done["compared"] += len(results)

    def round(self) -> None:
        """Something at random. Where memory is short, something is freed."""
        try:
            work = self.random.choice(
                [self.build] * (len(self.live) < LIVE) + [self.free] * bool(self.live) + [None]
            )
            work() if work else self.launch(self.live)
        except torch.OutOfMemoryError:
            self.note("out of memory")
            assert self.live, "there is no memory for one network"
            self.free_all()

    def free_all(self) -> None:
        self.live.clear()
        gc.collect()
        torch.cuda.empty_cache()


@torch.no_grad()
def test_the_same_bits_for_long(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # GEMMs are tuned once, here
    duration = float(os.environ.get("SOAK_SECONDS", 600))
    seed = int(os.environ.get("SOAK_SEED", 0))
    soak = Soak(seed, Path(os.environ.get("SOAK_LOG", "output/soak.json")))
    start = time.monotonic()
    ballast = None
    try:
        while (seconds := time.monotonic() - start) < duration:
            if ballast is None and seconds > duration / 2:
                soak.free_all()
                ballast = torch.empty(
                    max(0, torch.cuda.mem_get_info()[0] - HEADROOM),
                    dtype=torch.uint8,
                    device="cuda",
                )
                soak.note("memory pressure")
            soak.round()
            soak.write(seconds=seconds)
        torch.cuda.synchronize()
    except BaseException as error:
        soak.write(failure=f"{type(error).__name__}: {error}", seconds=time.monotonic() - start)
        raise
    soak.write(seconds=time.monotonic() - start, failure=None)
    assert soak.done["compared"] and soak.done["free"] and soak.done["build"]
