"""How GPUs share a batch with fewer pictures than there are of them: chosen by arithmetic and a measurement.

Arithmetic leaves few layouts (layouts.py). What a layer and its exchange then cost differs from machine to machine. So
each layout that is left evaluates a few blocks of the network, for a few milliseconds. Every rank makes the same calls.
"""

import time
from collections.abc import Callable, Iterable
from math import isqrt
from pathlib import Path
from typing import NamedTuple

import torch

from accel import kernels
from accel.errors import UsageError
from accel.graphs import capture
from accel.network import BlockNetwork, Network
from accel.parallel import choices, layouts
from accel.parallel.groups import Groups
from accel.parallel.layouts import OFF, Layout, candidates
from accel.parallel.processes import Job

DEPTHS = 2, 6  # blocks that are timed; the difference gives the time of a block


class Evaluation(NamedTuple):
    """What the ranks of a job evaluate together."""

    pictures: int  # of all ranks
    tokens: int  # of a batch row
    heads: int
    tier: str


def check(layout: Layout, evaluation: Evaluation, groups: Groups) -> None:
    """UsageError if `layout`, as the user asked for it, cannot run here."""
    layouts.check(layout, evaluation.tier, evaluation.tokens, evaluation.heads, groups.job.world)
    if layout.tokens > 1 and layout.exchange == "push" and not groups.peers():
        raise UsageError("`parallel=exchange=push`: needs NVLink between all these GPUs; take exchange=kv")


def share_evaluations(
    network: BlockNetwork, evaluation: Evaluation, groups: Groups, layout: Layout | None
) -> tuple[Network, Layout]:
    """(network as this rank evaluates it, layout); layout: one that `check` has passed, or None to choose.

    The collectives must be open. A rank that the layout leaves idle keeps its network.
    """
    if layout == OFF:
        return network, OFF
    job = groups.job
    job.wait_for_collectives()
    reason = "as it was asked for"
    if layout is None:
        layout, reason = choose_once(network, evaluation, groups)
    busy = min(evaluation.pictures, job.world) if layout.ranks == 1 else layout.ranks
    print(f"parallel: {layout}, {busy} of {job.world} GPUs: {reason}")
    shared = groups.apply(network, layout)
    tune(network, evaluation, job, [layout])
    return shared, layout


def tune(network: Network, evaluation: Evaluation, job: Job, layouts: Iterable[Layout]) -> None:
    """Let all ranks take the GEMMs that are the fastest on rank 0, or two runs of one job could differ."""
    sizes = {layout.row_tokens(evaluation.pictures, job.world, evaluation.tokens) for layout in layouts}
    network.tune(sorted(sizes))


def choose_once(network: BlockNetwork, evaluation: Evaluation, groups: Groups) -> tuple[Layout, str]:
    """`choose`, kept on disk: two layouts that are equally fast round differently, and two runs shall agree."""
    where = situation(network, evaluation, groups)
    if found := groups.job.from_rank_0(lambda: choices.known(where)):
        return found[0], f"{found[1]}; measured before on this machine ({choices.file()})"
    layout, reason = choose(network, evaluation, groups)
    if groups.job.rank == 0:
        choices.keep(where, layout, reason)
    return layout, reason


def situation(network: BlockNetwork, evaluation: Evaluation, groups: Groups) -> str:
    """What a choice depends on, in words."""
    hosts = groups.job.all_gather_object(groups.job.host)
    sizes = "+".join(str(hosts.count(host)) for host in dict.fromkeys(hosts))
    gpu = groups.device.type == "cuda"
    name = torch.cuda.get_device_name(groups.device) if gpu else f"processors of {torch.get_num_threads()} threads"
    code = kernels.version(kernels.FOLDER, Path(__file__).parent)
    pictures = f"{evaluation.pictures} pictures of {evaluation.tokens} tokens, {evaluation.tier}"
    return f"{sizes} {name}, code {code}, torch {torch.__version__}: {pictures}, {network.describe()}"


def choose(network: BlockNetwork, evaluation: Evaluation, groups: Groups) -> tuple[Layout, str]:
    """(the fastest of the candidates, its time and the others'); the same on every rank."""
    job, peers = groups.job, groups.peers()
    exchanges = [name for name in network.exchanges if peers or name != "push"]
    hosts = job.all_gather_object(job.host)
    found = candidates(evaluation.pictures, job.world, evaluation.tokens, evaluation.heads, hosts, exchanges)
    tune(network, evaluation, job, found)
    # Twice, and the better of both: the first pass also warms up the GPU and the communicators.
    passes = [[milliseconds(network, evaluation, groups, layout) for layout in found] for _ in range(2)]
    times = job.max_over_ranks(map(min, *passes))
    best = times.index(min(times))
    others = ", ".join(f"{layout} {ms:.2f}" for layout, ms in zip(found, times) if layout != found[best])
    return found[best], f"{times[best]:.2f} ms a step estimated" + (f"; {others}" if others else "")


@torch.no_grad()
def milliseconds(network: BlockNetwork, evaluation: Evaluation, groups: Groups, layout: Layout) -> float:
    """Estimated time of an evaluation under `layout` on this rank; 0 if it is idle."""
    depths = [min(depth, network.depth) for depth in DEPTHS]
    shared = [groups.apply(network.shallow(depth), layout) for depth in depths]  # idle ranks make its groups too
    world, side = groups.job.world, isqrt(evaluation.tokens) * network.patch_size
    if groups.job.rank >= layout.busy(world):
        return 0.0
    pictures = -(-evaluation.pictures // world) if layout.ranks == 1 else evaluation.pictures
    generator = torch.Generator(groups.device).manual_seed(0)  # its own: the run's random stream begins untouched
    x = torch.randn(pictures, network.in_channels, side, side, generator=generator, device=groups.device)
    index = torch.zeros(2 * pictures, dtype=torch.int64, device=groups.device)
    y, times = torch.zeros_like(index), []
    for one in shared:
        scheduled, advance = one.schedule([500], [0])
        advance(0)
        times.append(_milliseconds(lambda: scheduled.tokens(x, index, y), groups.device))
    a_block = (times[1] - times[0]) / max(depths[1] - depths[0], 1)
    return times[0] + a_block * (network.depth - depths[0])


def _milliseconds(step: Callable[[], object], device: torch.device) -> float:
    """Time of `step`, replayed from a graph on a GPU."""
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
