"""The layout for a batch with fewer pictures than GPUs, chosen by arithmetic and a
measurement.

Arithmetic leaves few layouts: of layouts with equal work per rank, the one with fewer
GPUs, then the one that divides tokens among fewer ranks (batch rows exchange nothing
before the end of an evaluation). The cost of a layer and its exchange differs from
machine to machine, so each of these layouts evaluates a few blocks of the network, for a
few milliseconds. Every rank makes the same calls.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import groupby
from math import isqrt
from pathlib import Path
from typing import NamedTuple

import torch

from accel import kernels
from accel.errors import UsageError
from accel.files import cache_folder
from accel.graphs import capture
from accel.network import BlockNetwork, Network
from accel.ranks import Ranks, layouts
from accel.ranks.placement import OFF, BatchRows, Layout, Placement

log = logging.getLogger(__name__)

DEPTHS = 2, 6  # numbers of blocks that are timed; the difference gives the time of a block


class Work(NamedTuple):
    """The network evaluations of a run, on all ranks."""

    pictures: int  # of all ranks
    at_once: int | None  # pictures that are denoised at a time; None: all
    copies: Counter[int]  # batch rows of a picture → number of the process's evaluations
    tokens: int  # of a batch row
    tier: str

    def evaluations(self, placement: Placement) -> Counter[BatchRows]:
        """Return the number of evaluations on this rank by their batch, before ranks divide it."""
        counts: Counter[BatchRows] = Counter()
        for batch in placement.batches(self.pictures, self.at_once):
            for copies, count in self.copies.items():
                counts[BatchRows(batch.stop - batch.start, copies)] += count
        return counts

    def load(self, placement: Placement) -> int:
        """Return the tokens in the GEMMs of all evaluations on this rank."""
        return sum(
            count * placement.row_tokens(*shape, self.tokens)
            for shape, count in self.evaluations(placement).items()
        )


class SharedNetwork(NamedTuple):
    """A network as this rank evaluates it, and this rank's placement."""

    network: Network
    placement: Placement


class Choice(NamedTuple):
    """A layout, and why it was chosen."""

    layout: Layout
    reason: str


def check(layout: Layout, tokens: int, heads: int, ranks: Ranks) -> None:
    """Raise UsageError if the user's layout cannot run here. tokens: of a batch row;
    heads: of the network.
    """
    layouts.check(layout, None, tokens, heads, ranks.world)
    if layout.tokens > 1 and layout.exchange == "push" and not ranks.peers():
        raise UsageError(
            "`parallel=exchange=push`: needs NVLink between all these GPUs; take exchange=kv"
        )


def share_evaluations(
    network: Network, work: Work, ranks: Ranks, layout: Layout | None
) -> SharedNetwork:
    """Share the evaluations of `network` among the ranks. layout: has passed `check`; None:
    choose one. The collectives must be open. An idle rank keeps its network.
    """
    if layout == OFF:
        return SharedNetwork(network, ranks.placement())
    ranks.wait_for_collectives()
    reason = "as it was asked for"
    if layout is None:
        layout, reason = choose_once(network, work, ranks)
    placement = ranks.placement(layout)
    busy = placement.busy if placement.shared else min(work.pictures, ranks.world)
    log.info(f"parallel: {layout}, {busy} of {ranks.world} GPUs: {reason}")
    shared = ranks.share(network, layout)
    tune(network, work, [placement])
    return SharedNetwork(shared, placement)


def tune(network: Network, work: Work, placements: Iterable[Placement]) -> None:
    """Choose the GEMMs of all evaluations that any rank makes in a run under each placement."""
    row_tokens = set()
    for placement in placements:
        for pictures in placement.sizes(work.pictures, work.at_once):
            for copies in work.copies:
                row_tokens.add(placement.row_tokens(pictures, copies, work.tokens))
    network.tune(row_tokens)


def choose_once(network: BlockNetwork, work: Work, ranks: Ranks) -> Choice:
    """Choose a layout and keep it on disk: layouts of equal speed round differently, and
    two runs must agree.
    """
    key = situation(network, work, ranks)
    file = cache_folder() / "plans.json"
    kept = ranks.from_rank_0(lambda: kernels.kept(file).get(key))
    if kept:
        with suppress(TypeError, ValueError):  # a damaged entry; a UsageError is a ValueError
            text, reason = kept
            layout = OFF if text == "off" else layouts.parse(f"{text}")
            return Choice(layout, f"{reason}; measured before on this machine ({file})")
    choice = choose(network, work, ranks)
    if ranks.rank == 0:
        text = "off" if choice.layout == OFF else str(choice.layout)
        plans = {**kernels.kept(file), key: [text, choice.reason]}
        if not kernels.keep(file, json.dumps(plans, indent=1).encode()):
            log.warning(
                f"{file}: cannot be written, so each run chooses anew, and another layout has "
                f"other last bits; add --parallel {text} to keep this one"
            )
    return choice


def situation(network: BlockNetwork, work: Work, ranks: Ranks) -> str:
    """Describe all that a choice depends on: the key of a kept layout."""
    host_of = ranks.all_gather_object(ranks.host)
    neighbours = [len(list(group)) for _, group in groupby(host_of)]  # in a row on one host
    hosts = "+".join(map(str, neighbours)) + (" peers" if ranks.peers() else "")
    processor = f"processors of {torch.get_num_threads()} threads"
    if ranks.device.type == "cuda":
        processor = torch.cuda.get_device_name(ranks.device)
    code = kernels.version(kernels.FOLDER, Path(__file__).parent)
    batch = f"{work.pictures} pictures, {work.at_once or 'all'} at a time, of {work.tokens} tokens"
    evaluations = work.copies.total()
    rows = ", ".join(
        f"{copies} batch rows each in {count / evaluations:.0%} of evaluations"
        for copies, count in sorted(work.copies.items())
    )
    machine = f"{hosts} {processor}, code {code}, torch {torch.__version__}"
    return f"{machine}: {batch}, {rows}, {work.tier}, {network.describe()}"


def choose(network: BlockNetwork, work: Work, ranks: Ranks) -> Choice:
    """Return the fastest candidate, the same on every rank; the reason has all times."""
    peers = ranks.peers()
    exchanges = [name for name in network.exchanges if peers or name != "push"]
    if not network.divides_tokens:
        exchanges = []
    host_of = ranks.all_gather_object(ranks.host)
    tried = candidates(work, network.num_heads, host_of, exchanges)
    tune(network, work, [Placement(layout, ranks.world) for layout in tried])
    # The better of two passes: the first also warms up the GPU and the communicators.
    first = [milliseconds(network, work, ranks, layout) for layout in tried]
    second = [milliseconds(network, work, ranks, layout) for layout in tried]
    times = ranks.max_over_ranks(map(min, first, second))
    best = times.index(min(times))
    texts = [f"{layout} {ms:.2f}" for layout, ms in zip(tried, times, strict=True)]
    texts[best] = f"{times[best]:.2f} ms per step estimated"
    reason = [texts.pop(best)]
    if texts:
        reason.append(", ".join(texts))
    return Choice(tried[best], "; ".join(reason))


def candidates(
    work: Work, heads: int, host_of: list[str], exchanges: Iterable[str]
) -> list[Layout]:
    """Return the layouts worth timing, the least parallel first.

    host_of: each rank's host; exchanges: names of the token exchanges that the devices
    and the network support.
    """
    world = len(host_of)

    def load(layout):
        return work.load(Placement(layout, world))

    chosen = [OFF]
    for mesh in sorted(
        _meshes(work, host_of), key=lambda mesh: (mesh.ranks, load(mesh), mesh.tokens)
    ):
        if load(mesh) >= load(chosen[-1]):
            continue
        if mesh.tokens == 1:
            chosen.append(mesh)
            continue
        for name in exchanges:
            if name != "ulysses" or heads % mesh.tokens == 0:
                chosen.append(mesh._replace(exchange=name))
    return chosen


def _meshes(work, host_of):
    """Return every layout of batch rows and tokens on these hosts. Tokens stay in a host."""
    world = len(host_of)
    batch_rows = max(work.copies) * min(work.pictures, work.at_once or work.pictures)
    meshes = []
    for rows in range(1, min(world, batch_rows) + 1):
        for columns in range(1, world // rows + 1):
            hosts_of_rows = [
                set(host_of[first : first + columns]) for first in range(0, rows * columns, columns)
            ]
            together = all(len(hosts) == 1 for hosts in hosts_of_rows)
            if rows * columns > 1 and together and work.tokens % columns == 0:
                meshes.append(Layout(rows, columns))
    return meshes


@torch.no_grad()
def milliseconds(network: BlockNetwork, work: Work, ranks: Ranks, layout: Layout) -> float:
    """Return the estimated time of a step of all pictures under `layout` on this rank; 0
    if it is idle.
    """
    depths = [min(depth, network.depth) for depth in DEPTHS]
    # Idle ranks make its groups too.
    networks = [ranks.share(network.shallow(depth), layout) for depth in depths]
    placement = Placement(layout, ranks.world)  # of rank 0, which has the most pictures
    if ranks.rank >= placement.busy:
        return 0.0
    side = isqrt(work.tokens) * network.patch_size
    # A generator for this measurement: the run's random stream begins untouched.
    generator = torch.Generator(ranks.device).manual_seed(0)
    times = []
    for shared in networks:
        scheduled, advance = shared.schedule([500], [0])
        advance(0)
        total = 0.0
        for (pictures, copies), count in work.evaluations(placement).items():
            shape = pictures, network.in_channels, side, side
            x = torch.randn(shape, generator=generator, device=ranks.device)
            # Indices and labels.
            zeros = torch.zeros(copies * pictures, dtype=torch.int64, device=ranks.device)
            step = partial(scheduled.tokens, x, zeros, zeros)
            total += count * _milliseconds(step, ranks.device)
        times.append(total / work.copies.total())
    time_of_block = (times[1] - times[0]) / max(depths[1] - depths[0], 1)
    return times[0] + time_of_block * (network.depth - depths[0])


def _milliseconds(step: Callable[[], object], device: torch.device) -> float:
    """Return the time of `step`, replayed from a graph on a GPU."""
    if device.type != "cuda":
        step()
        begun = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - begun)
    replay = capture(step)
    replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    for mark in marks:
        mark.record()
        for _ in range(4):
            replay()
    torch.cuda.synchronize(device)
    return min(before.elapsed_time(after) for before, after in zip(marks, marks[1:])) / 4
