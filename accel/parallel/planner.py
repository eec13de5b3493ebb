"""Which ranks compute what of a batch with fewer pictures than GPUs: chosen by arithmetic and a measurement.

Arithmetic leaves few layouts: of those that give a rank no less to do, the one with fewer GPUs, then the one that
divides tokens among fewer ranks (batch rows exchange nothing before the end of an evaluation). What a layer and its
exchange then cost differs from machine to machine. So each layout that is left evaluates a few blocks of the network,
for a few milliseconds.
"""

import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accel import kernels, precision
from accel.errors import UsageError
from accel.files import atomic_write, cache_folder, read_json
from accel.graphs import capture
from accel.kernels import cuda
from accel.network import BlockNetwork, Network
from accel.options import DistributedOptions
from accel.parallel.exchanges import EXCHANGES
from accel.parallel.processes import Job
from accel.parallel.sharded import Sharded

DEPTHS = 2, 6  # blocks that are timed; the difference gives the time of a block


class Layout(NamedTuple):
    """What a rank computes of a network evaluation. One rank of each: it has pictures of its own (data parallel)."""

    rows: int = 1  # ranks that divide the batch rows
    tokens: int = 1  # ranks that divide the tokens of each row
    exchange: str = "kv"  # between the latter
    weights: int = 1  # ranks that divide every layer's weights; then neither rows nor tokens are divided

    @property
    def ranks(self) -> int:
        """How many ranks share a network evaluation."""
        return self.rows * self.tokens * self.weights

    def busy(self, world: int) -> int:
        """How many of `world` ranks compute."""
        return self.ranks if self.ranks > 1 else world

    def batch(self, pictures: int, world: int, copies: int) -> tuple[int, int]:
        """(latents, batch rows of each) of an evaluation on a rank, `copies` batch rows a picture; of ranks that have
        unlike shares, the largest."""
        if self.rows * self.tokens > 1:
            return -(-copies * pictures // self.rows), 1
        return -(-pictures // (world if self.ranks == 1 else 1)), copies

    def row_tokens(self, pictures: int, world: int, tokens: int) -> int:
        """Tokens that a rank's GEMMs have at once with guidance: batch rows × its part of the `tokens` of a row."""
        latents, copies = self.batch(pictures, world, 2)
        return latents * copies * (tokens // self.tokens)

    def __str__(self):
        if self.ranks == 1:
            return "a GPU a picture"
        if self.weights > 1:
            return f"weights={self.weights}"
        return f"rows={self.rows}" + (f",tokens={self.tokens},exchange={self.exchange}" if self.tokens > 1 else "")


OFF = Layout()


def candidates(
    pictures: int, world: int, tokens: int, heads: int, host_of: list[str], exchanges: Iterable[str]
) -> list[Layout]:
    """The layouts worth timing for so many pictures with guidance, the least parallel first.

    host_of: each rank's host; exchanges: those that these devices and this network can use.
    """

    def load(layout):
        return layout.row_tokens(pictures, world, tokens)

    def fits(rows, size):  # tokens stay in a host
        hosts = [set(host_of[row * size : (row + 1) * size]) for row in range(rows)]
        return tokens % size == 0 and all(len(those) == 1 for those in hosts)

    meshes = [
        Layout(rows, size)
        for rows in range(1, min(world, 2 * pictures) + 1)
        for size in range(1, world // rows + 1)
        if rows * size > 1 and fits(rows, size)
    ]
    found = [OFF]
    for layout in sorted(meshes, key=lambda layout: (layout.ranks, load(layout), layout.tokens)):
        if load(layout) >= load(found[-1]):
            continue
        if layout.tokens == 1:
            found.append(layout)
            continue
        usable = [name for name in exchanges if name != "ulysses" or heads % layout.tokens == 0]
        found += [layout._replace(exchange=name) for name in usable]
    return found


class Planner:
    """Shares the network of a grid among the ranks of a job. Every rank makes the same calls.

    options: with --device as `Job.device` gave it; model: theirs, on any device, also meta.
    """

    def __init__(self, job: Job, options: DistributedOptions, model: torch.nn.Module):
        self.job, self.options = job, options
        self.tokens = (options.latent_size // model.patch_size) ** 2
        self.heads = model.num_heads
        self.device, self.pictures = torch.device(options.device), len(options.labels)
        self.tier = options.precision or precision.default_tier(self.device)
        self.groups, self.exchanges = {}, {}  # by their ranks, each made once

    def wanted(self) -> Layout | None:
        """The layout that --parallel names; None if it is to be chosen. Raises UsageError if it cannot run."""
        options = self.options
        if not options.guided:
            if options.mesh is not None:
                raise UsageError(f"--parallel {options.parallel}: shares evaluations with guidance only; use off")
            return OFF
        if options.mesh is None:
            # With a picture for every GPU there is nothing to share.
            return OFF if options.parallel == "off" or self.pictures >= self.job.world else None
        layout = Layout(**{"exchange": "ulysses" if self.tier == "exact" else "kv", **options.mesh})
        self.check(layout)
        return layout if layout.ranks > 1 else OFF

    def check(self, layout: Layout) -> None:
        """UsageError if `layout`, as the user asked for it, cannot run here."""
        problem, exchange = None, layout.exchange if layout.tokens > 1 else None
        if exchange not in (None, "ulysses") and self.tier == "exact":
            problem = f"exchange={exchange}: keeps no float32 accuracy; take exchange=ulysses with --precision exact"
        elif layout.weights > 1 and self.tier == "exact":
            problem = f"{layout}: sums in the GEMMs' precision; take --precision fp32, tf32 or fp16"
        elif layout.ranks > self.job.world:
            problem = f"{layout}: needs {layout.ranks} processes, there are {self.job.world}"
        elif self.heads % layout.weights:
            problem = f"weights={layout.weights}: does not divide {self.heads} heads; {self._divisors(self.heads)}"
        elif self.tokens % layout.tokens:
            tokens = f"the {self.tokens} tokens of a row"
            problem = f"tokens={layout.tokens}: does not divide {tokens}; {self._divisors(self.tokens)}"
        elif exchange == "ulysses" and self.heads % layout.tokens:
            problem = f"tokens={layout.tokens},exchange=ulysses: does not divide {self.heads} heads; take exchange=kv"
        elif exchange == "push" and not self.peers():
            problem = "exchange=push: needs NVLink between all these GPUs; take exchange=kv"
        if problem:
            raise UsageError(f"--parallel {problem}")

    def _divisors(self, number):
        return "try " + " or ".join(str(ranks) for ranks in range(1, self.job.world + 1) if number % ranks == 0)

    def peers(self) -> bool:
        """Whether every rank's GPU can write into every other's."""
        if self.device.type != "cuda":
            return False
        here, others = self.device.index or 0, range(torch.cuda.device_count())
        peers = len(others) >= self.job.world and all(cuda.writes_to_peer(here, gpu) for gpu in others if gpu != here)
        ranks = self.job.all_gather_object((self.job.host, peers))
        return len({host for host, _ in ranks}) == 1 and all(peers for _, peers in ranks)

    def parallel(self, network: BlockNetwork, layout: Layout | None) -> tuple[Network, Layout]:
        """(network as this rank evaluates it, layout); layout: the one `wanted`, or None to choose.

        The collectives must be open. A rank that the layout leaves idle keeps its network.
        """
        if layout == OFF:
            return network, OFF
        self.job.wait_for_collectives()
        reason = "given by --parallel"
        if layout is None:
            layout, reason = self.choose_once(network)
        busy = min(self.pictures, self.job.world) if layout.ranks == 1 else layout.ranks
        print(f"parallel: {layout}, {busy} of {self.job.world} GPUs: {reason}")
        shared = self.apply(network, layout)  # which may divide the GEMMs of `network`
        self.tune(network, [layout])
        return shared, layout

    def tune(self, network: Network, layouts: Iterable[Layout]) -> None:
        """Let all ranks take the GEMMs that are the fastest on rank 0, or two runs of one job could differ."""
        sizes = {layout.row_tokens(self.pictures, self.job.world, self.tokens) for layout in layouts}
        network.tune(sorted(sizes))

    def apply(self, network: BlockNetwork, layout: Layout) -> Network:
        """The network as `layout` has it on this rank; network itself on a rank that shares no evaluation."""
        if layout.ranks == 1:
            return network
        everyone, size = self._group(range(layout.ranks)), layout.tokens
        neighbours = [range(first, first + size) for first in range(0, layout.ranks, size)]  # on one host if they fit
        groups = [self._group(ranks) for ranks in neighbours] if size > 1 else []
        if self.job.rank >= layout.ranks:
            return network
        if layout.weights > 1:
            from accel.parallel.tensor_parallel import divide_weights  # DTensor takes a second to import

            return divide_weights(network, DeviceMesh.from_group(everyone, self.device.type))
        if size == 1:
            return Sharded(network, everyone)
        row = self.job.rank // size
        key = neighbours[row], layout.exchange
        if key not in self.exchanges:  # one for all networks: it has buffers in its peers' memory
            self.exchanges[key] = EXCHANGES[layout.exchange](groups[row])
        return Sharded(network, everyone, self.exchanges[key])

    def _group(self, ranks):
        """The process group of the range `ranks`; every rank of the job makes it, in the same order."""
        if len(ranks) == self.job.world:
            return dist.group.WORLD
        if ranks not in self.groups:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            self.groups[ranks] = dist.new_group(list(ranks), backend=backend)
        return self.groups[ranks]

    def choose_once(self, network: BlockNetwork) -> tuple[Layout, str]:
        """`choose`, kept on disk: two layouts that are equally fast round differently, and two runs shall agree."""
        file, situation = cache_folder() / "plans.json", self.situation(network)
        known = self.job.from_rank_0(lambda: _read(file).get(situation))
        if known:
            return Layout(*known[0]), f"{known[1]}; measured before on this machine ({file})"
        layout, reason = self.choose(network)
        if self.job.rank == 0:
            _write(file, {**_read(file), situation: [layout, reason]})
        return layout, reason

    def situation(self, network: BlockNetwork) -> str:
        """What a choice depends on, in words."""
        hosts = self.job.all_gather_object(self.job.host)
        sizes = "+".join(str(hosts.count(host)) for host in dict.fromkeys(hosts))
        gpu = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if gpu else f"processors of {torch.get_num_threads()} threads"
        code = kernels.version(kernels.FOLDER, Path(__file__).parent)
        pictures = f"{self.pictures} pictures of {self.tokens} tokens, {self.tier}"
        return f"{sizes} {name}, code {code}, torch {torch.__version__}: {pictures}, {network.describe()}"

    def choose(self, network: BlockNetwork) -> tuple[Layout, str]:
        """(the fastest of the candidates, its time and the others'); the same on every rank."""
        peers, hosts = self.peers(), self.job.all_gather_object(self.job.host)
        exchanges = [name for name in network.exchanges if peers or name != "push"]
        layouts = candidates(self.pictures, self.job.world, self.tokens, self.heads, hosts, exchanges)
        self.tune(network, layouts)
        # Twice, and the better of both: the first pass also warms up the GPU and the communicators.
        passes = [[self.milliseconds(network, layout) for layout in layouts] for _ in range(2)]
        times = self.job.max_over_ranks(map(min, *passes))
        best = times.index(min(times))
        others = ", ".join(f"{layout} {ms:.2f}" for layout, ms in zip(layouts, times) if layout != layouts[best])
        return layouts[best], f"{times[best]:.2f} ms a step estimated" + (f"; {others}" if others else "")

    @torch.no_grad()
    def milliseconds(self, network: BlockNetwork, layout: Layout) -> float:
        """Estimated time of an evaluation under `layout` on this rank; 0 if it is idle."""
        depths = [min(depth, network.depth) for depth in DEPTHS]
        shared = [self.apply(network.shallow(depth), layout) for depth in depths]  # idle ranks make its groups too
        if self.job.rank >= layout.busy(self.job.world):
            return 0.0
        pictures = -(-self.pictures // self.job.world) if layout.ranks == 1 else self.pictures
        shape = pictures, network.in_channels, self.options.latent_size, self.options.latent_size
        generator = torch.Generator(self.device).manual_seed(0)  # its own: the run's random stream begins untouched
        x = torch.randn(shape, generator=generator, device=self.device)
        index = torch.zeros(2 * pictures, dtype=torch.int64, device=self.device)
        y, times = torch.zeros_like(index), []
        for one in shared:
            scheduled, advance = one.schedule([500], [0])
            advance(0)
            times.append(_milliseconds(lambda: scheduled.tokens(x, index, y), self.device))
        a_block = (times[1] - times[0]) / max(depths[1] - depths[0], 1)
        return times[0] + a_block * (network.depth - depths[0])


def _read(file):
    """[layout, reason] chosen earlier, by situation. An absent or damaged file has none, a damaged entry is none."""
    try:
        known = read_json(file).items()
    except (OSError, ValueError):
        return {}
    return {situation: entry for situation, entry in known if _is_choice(entry)}


def _is_choice(entry):
    match entry:
        case [[int(rows), int(tokens), str(exchange), int(weights)], str()]:  # a Layout, as JSON has it
            return min(rows, tokens, weights) >= 1 and exchange in EXCHANGES
    return False


def _write(file, known):
    with suppress(OSError):  # a read-only home: timed at every start
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file, "w", through_link=False) as out:
            json.dump(known, out, indent=1)


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
