"""The layout for a batch with fewer pictures than GPUs, chosen by arithmetic and a
measurement.

Arithmetic leaves few layouts: of layouts with equal work per rank, the one with fewer
GPUs, then the one that divides tokens among fewer ranks (batch rows exchange nothing
before the end of an evaluation). The cost of a layer and its exchange differs from
machine to machine, so each of these layouts evaluates a few blocks of the network, for a
few milliseconds. Every rank makes the same calls.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import groupby, product
from math import isqrt
from pathlib import Path
from typing import NamedTuple

import torch

from accel import kernels
from accel.errors import UsageError
from accel.files import cache_folder
from accel.graphs import capture
from accel.network import BlockNetwork, Network
from accel.parallel import layouts
from accel.parallel.groups import Groups
from accel.parallel.layouts import OFF, Layout
from accel.parallel.placement import Placement

DEPTHS = 2, 6  # numbers of blocks that are timed; the difference gives the time of a block


class Work(NamedTuple):
    """The network evaluations of a run, on all ranks."""

    pictures: int  # of all ranks
    at_once: int | None  # pictures that are denoised at a time; None: all
    copies: Counter[int]  # batch rows of a picture → number of the process's evaluations
    tokens: int  # of a batch row
    tier: str

    def evaluations(self, placement: Placement) -> Counter[tuple[int, int]]:
        """Return the number of evaluations on this rank by (pictures, batch rows of each)."""
        found = Counter()
        for part in placement.batches(self.pictures, self.at_once):
            found.update(
                {(part.stop - part.start, copies): count for copies, count in self.copies.items()}
            )
        return found

    def load(self, placement: Placement) -> int:
        """Return the tokens in the GEMMs of all evaluations on this rank."""
        shapes = self.evaluations(placement).items()
        return sum(count * placement.row_tokens(*shape, self.tokens) for shape, count in shapes)


def check(layout: Layout, tokens: int, heads: int, groups: Groups) -> None:
    """Raise UsageError if the user's layout cannot run here. tokens: of a batch row;
    heads: of the network.
    """
    layouts.check(layout, None, tokens, heads, groups.job.world)
    if layout.tokens > 1 and layout.exchange == "push" and not groups.peers():
        raise UsageError(
            "`parallel=exchange=push`: needs NVLink between all these GPUs; take exchange=kv"
        )


def share_evaluations(
    network: BlockNetwork, work: Work, groups: Groups, layout: Layout | None
) -> tuple[Network, Placement]:
    """Return the network as this rank evaluates it, and this rank's placement. layout:
    has passed `check`; None: choose one. The collectives must be open. An idle rank keeps
    its network.
    """
    job = groups.job
    if layout == OFF:
        return network, Placement(OFF, job.world, job.rank)
    job.wait_for_collectives()
    reason = "as it was asked for"
    if layout is None:
        layout, reason = choose_once(network, work, groups)
    placement = Placement(layout, job.world, job.rank)
    busy = placement.busy if placement.shared else min(work.pictures, job.world)
    print(f"parallel: {layout}, {busy} of {job.world} GPUs: {reason}")
    shared = groups.apply(network, layout)
    tune(network, work, [placement])
    return shared, placement


def tune(network: Network, work: Work, placements: Iterable[Placement]) -> None:
    """Choose the GEMMs of all evaluations that any rank makes in a run under each placement."""
    row_tokens = set()
    for one in placements:
        shapes = product(one.sizes(work.pictures, work.at_once), work.copies)
        row_tokens |= {one.row_tokens(*shape, work.tokens) for shape in shapes}
    network.tune(row_tokens)


def choose_once(network: BlockNetwork, work: Work, groups: Groups) -> tuple[Layout, str]:
    """Choose a layout and keep it on disk: layouts of equal speed round differently, and
    two runs must agree.
    """
    where = situation(network, work, groups)
    file = cache_folder() / "plans.json"
    if found := groups.job.from_rank_0(lambda: kernels.kept(file).get(where)):
        with suppress(TypeError, ValueError):  # a damaged entry; a UsageError is a ValueError
            text, reason = found
            layout = OFF if text == "off" else layouts.parse(f"{text}")
            return layout, f"{reason}; measured before on this machine ({file})"
    layout, reason = choose(network, work, groups)
    if groups.job.rank == 0:
        text = "off" if layout == OFF else str(layout)
        choices = {**kernels.kept(file), where: [text, reason]}
        if not kernels.keep(file, json.dumps(choices, indent=1).encode()):
            print(
                f"{file}: cannot be written, so each run chooses anew, and another layout has "
                f"other last bits; add --parallel {text} to keep this one"
            )
    return layout, reason


def situation(network: BlockNetwork, work: Work, groups: Groups) -> str:
    """Describe all that a choice depends on: the key of a kept layout."""
    # ranks in a row that are on one host
    neighbours = groupby(groups.job.all_gather_object(groups.job.host))
    sizes = "+".join(str(len([*ranks])) for _, ranks in neighbours) + " peers" * groups.peers()
    gpu = groups.device.type == "cuda"
    name = (
        torch.cuda.get_device_name(groups.device)
        if gpu
        else f"processors of {torch.get_num_threads()} threads"
    )
    code = kernels.version(kernels.FOLDER, Path(__file__).parent)
    batch = f"{work.pictures} pictures, {work.at_once or 'all'} at a time, of {work.tokens} tokens"
    shares = sorted((copies, count / work.copies.total()) for copies, count in work.copies.items())
    rows = ", ".join(
        f"{copies} batch rows each in {share:.0%} of evaluations" for copies, share in shares
    )
    where = f"{sizes} {name}, code {code}, torch {torch.__version__}"
    return f"{where}: {batch}, {rows}, {work.tier}, {network.describe()}"


def choose(network: BlockNetwork, work: Work, groups: Groups) -> tuple[Layout, str]:
    """Return the fastest candidate and a text with all times, the same on every rank."""
    job = groups.job
    peers = groups.peers()
    exchanges = [name for name in network.exchanges if peers or name != "push"]
    hosts = job.all_gather_object(job.host)
    found = candidates(work, network.num_heads, hosts, exchanges)
    tune(network, work, [Placement(layout, job.world) for layout in found])
    # The better of two passes: the first also warms up the GPU and the communicators.
    passes = [[milliseconds(network, work, groups, layout) for layout in found] for _ in range(2)]
    times = job.max_over_ranks(map(min, *passes))
    best = times.index(min(times))
    others = ", ".join(
        f"{layout} {ms:.2f}" for layout, ms in zip(found, times) if layout != found[best]
    )
    return found[best], f"{times[best]:.2f} ms a step estimated" + (f"; {others}" if others else "")


def candidates(
    work: Work, heads: int, host_of: list[str], exchanges: Iterable[str]
) -> list[Layout]:
    """Return the layouts worth timing, the least parallel first.

    host_of: each rank's host; exchanges: names of the token exchanges that the devices
    and the network support.
    """
    world = len(host_of)
    tokens = work.tokens

    def load(layout):
        return work.load(Placement(layout, world))

    def fits(rows, size):  # tokens stay in a host
        together = all(len(set(host_of[row * size : (row + 1) * size])) == 1 for row in range(rows))
        return together and tokens % size == 0

    batch_rows = max(work.copies) * min(work.pictures, work.at_once or work.pictures)
    meshes = [
        Layout(rows, size)
        for rows in range(1, min(world, batch_rows) + 1)
        for size in range(1, world // rows + 1)
        if rows * size > 1 and fits(rows, size)
    ]
    found = [OFF]
    for layout in sorted(meshes, key=lambda layout: (layout.ranks, load(layout), layout.tokens)):
        if load(layout) < load(found[-1]):
            usable = [name for name in exchanges if name != "ulysses" or heads % layout.tokens == 0]
            found += (
                [layout._replace(exchange=name) for name in usable]
                if layout.tokens > 1
                else [layout]
            )
    return found


@torch.no_grad()
def milliseconds(network: BlockNetwork, work: Work, groups: Groups, layout: Layout) -> float:
    """Return the estimated time of a step of all pictures under `layout` on this rank; 0
    if it is idle.
    """
    depths = [min(depth, network.depth) for depth in DEPTHS]
    # idle ranks make its groups too
    shared = [groups.apply(network.shallow(depth), layout) for depth in depths]
    placement = Placement(layout, groups.job.world)  # of rank 0, which has the most pictures
    if groups.job.rank >= placement.busy:
        return 0.0
    device = groups.device
    evaluations = work.evaluations(placement)
    times = []
    side = isqrt(work.tokens) * network.patch_size
    # its own: the run's random stream begins untouched
    generator = torch.Generator(device).manual_seed(0)
    for one in shared:
        scheduled, advance = one.schedule([500], [0])
        advance(0)
        total = 0.0
        for (pictures, copies), count in evaluations.items():
            x = torch.randn(
                pictures, network.in_channels, side, side, generator=generator, device=device
            )
            # indices and labels
            zeros = torch.zeros(copies * pictures, dtype=torch.int64, device=device)
            total += count * _milliseconds(partial(scheduled.tokens, x, zeros, zeros), device)
        times.append(total / work.copies.total())
    a_block = (times[1] - times[0]) / max(depths[1] - depths[0], 1)
    return times[0] + a_block * (network.depth - depths[0])


def _milliseconds(step: Callable[[], object], device: torch.device) -> float:
    """Return the time of `step`, replayed from a graph on a GPU."""
    if device.type != "cuda":
        step()
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)
    replay = capture(step)
    replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    for mark in marks:
        mark.record()
        for _ in range(4):
            replay()
    torch.cuda.synchronize(device)
    return min(before.elapsed_time(after) for before, after in zip(marks, marks[1:])) / 4
