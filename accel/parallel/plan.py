"""Which ranks compute what of a batch with fewer pictures than GPUs: chosen by arithmetic and a measurement on the machine itself.

Arithmetic leaves few meshes: of those that give a rank no less to do, the one with fewer GPUs, then the one with fewer ranks of tokens (rows need no
word between ranks until a step's end). What a layer and its exchange then cost, no table knows: the same products take longer on one machine,
the same bytes on another. So each mesh left runs the network with a few of its blocks, as it would run the whole, for a few milliseconds.
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accel import kernels, precision
from accel.kernels import cuda
from accel.kernels.adaln import Modulation
from accel.options import UsageError, partial_file
from accel.parallel.pipeline import Pipelined
from accel.parallel.sharded import PlainPieces, Sharded, make_mesh
from accel.parallel.tokens import EXCHANGES

DEPTHS = 2, 6  # blocks of the network that are timed: their difference is the time of four


class Plan(NamedTuple):
    """A mesh and how its tokens attend. One rank of each: every rank has pictures of its own (data parallel)."""

    rows: int = 1
    tokens: int = 1
    exchange: str = "kv"
    weights: int = 1  # over so many ranks every layer is divided; then neither rows nor tokens are
    stages: int = 1  # so many ranks have some of the blocks each, and patches of tokens flow through them; approximate
    patches: int = 8
    warmup: int = 25  # steps that are exact

    @property
    def ranks(self):
        return self.rows * self.tokens * self.weights * self.stages

    def __str__(self):
        if self.weights > 1:
            return f"weights={self.weights}"
        if self.stages > 1:
            return f"stages={self.stages},patches={self.patches},warmup={self.warmup}"
        return f"rows={self.rows}" + (f",tokens={self.tokens},exchange={self.exchange}" if self.tokens > 1 else "")


OFF = Plan()


def check(plan, world, peers, tokens, heads, depth):
    """UsageError if `plan`, as the user asked for it, cannot run: on `world` ranks, whose GPUs can write into each other or not
    (`peers`), for rows of `tokens` tokens, `heads` heads and `depth` blocks."""
    if plan.ranks > world:
        raise UsageError(f"--parallel {plan}: needs {plan.ranks} processes, there are {world}")
    if heads % plan.weights:
        raise UsageError(
            f"--parallel weights={plan.weights}: does not divide {heads} heads; try "
            f"{' or '.join(str(s) for s in range(1, world + 1) if heads % s == 0)}"
        )
    if plan.stages > 1 and tokens % plan.patches:
        raise UsageError(
            f"--parallel patches={plan.patches}: does not divide the {tokens} tokens of a row; take a power of two"
        )
    if plan.stages > depth:
        raise UsageError(f"--parallel stages={plan.stages}: the network has {depth} blocks; take fewer stages")
    if tokens % plan.tokens:
        raise UsageError(
            f"--parallel tokens={plan.tokens}: does not divide the {tokens} tokens of a row; try "
            f"{' or '.join(str(s) for s in range(1, world + 1) if tokens % s == 0)}"
        )
    if plan.tokens > 1 and plan.exchange == "ulysses" and heads % plan.tokens:
        raise UsageError(
            f"--parallel tokens={plan.tokens},exchange=ulysses: does not divide {heads} heads; take exchange=kv"
        )
    if plan.tokens > 1 and plan.exchange == "push" and not peers:
        raise UsageError(
            "--parallel exchange=push: writes into the memory of other GPUs over NVLink, which not all have here; take exchange=kv"
        )


def candidates(pictures, world, tokens, heads, host_of, exchanges):
    """The plans worth measuring for so many pictures with guidance, the least parallel first. host_of: each rank's host; exchanges: what these
    devices can do."""

    def load(plan):
        return -(-2 * pictures // plan.rows) * tokens // plan.tokens  # tokens that a rank computes

    def fits(rows, size):
        return tokens % size == 0 and all(
            len(set(host_of[r * size : (r + 1) * size])) == 1 for r in range(rows)
        )  # tokens stay in a host

    # Pictures for ranks, the usual way, first: it needs as many ranks as a mesh that gives no rank less to do.
    found, least = [OFF], 2 * -(-pictures // world) * tokens
    meshes = [
        Plan(rows, size)
        for rows in range(1, min(world, 2 * pictures) + 1)
        for size in range(1, world // rows + 1)
        if fits(rows, size)
    ]
    for plan in sorted(meshes, key=lambda plan: (plan.ranks, load(plan), plan.tokens)):
        if load(plan) < least:
            least = load(plan)
            found += (
                [plan._replace(exchange=name) for name in exchanges if name != "ulysses" or heads % plan.tokens == 0]
                if plan.tokens > 1
                else [plan]
            )
    return found


class Planner:
    """Makes a job's network parallel. group: the job's ranks; pictures, latent: how many latents of which side; tokens, heads, depth: of the network.
    Every rank makes the same calls."""

    def __init__(self, group, device, pictures, latent, tokens, heads, depth):
        self.group, self.device, self.pictures, self.latent, self.tokens = (
            group,
            torch.device(device),
            pictures,
            latent,
            tokens,
        )
        self.heads, self.depth = heads, depth
        self.hosts = group.tell("hosts", group.host)

    def wanted(self, options):
        """The plan that the options name, checked; None where it is to be measured."""
        if options.mesh is not None:
            plan = Plan(**{"exchange": "ulysses" if options.precision == "exact" else "kv", **options.mesh})
            if options.precision == "exact" and plan.tokens > 1 and plan.exchange != "ulysses":
                raise UsageError(
                    f"--parallel exchange={plan.exchange}: keeps no float32 accuracy; take exchange=ulysses with --precision exact"
                )
            tier = options.precision or precision.default_tier(self.device)
            if plan.stages > 1 and tier == "exact":
                raise UsageError(f"--parallel {plan}: is approximate, and --precision exact is not; drop one of them")
            if plan.weights > 1 and tier not in ("fp32", "tf32"):
                raise UsageError(f"--parallel {plan}: divides the plain network; add --precision tf32 or fp32")
            check(plan, self.group.world, plan.exchange == "push" and self.peers(), self.tokens, self.heads, self.depth)
            return plan if plan.ranks > 1 else OFF
        # With a picture for every GPU nothing needs to be said between them; torch.compile's network is in one piece.
        return OFF if options.parallel == "off" or self.pictures >= self.group.world or options.compile else None

    def parallel(self, network, plan=None):
        """network: a FastDiT or models.DiT, the same on every rank; plan: the one to use, or None to choose. The collectives must be open. Returns
        the parallel network, None on a rank that is left idle, and the plan."""
        if plan == OFF:
            return network, OFF
        self.begin(network)
        reason = "as told"
        if plan is not None and plan.weights > 1:
            from accel.parallel.tensor import (
                divide_weights,
            )  # brings DTensor: a second that other plans need not wait for

            mesh = DeviceMesh(self.device.type, torch.arange(plan.weights))
            print(f"parallel: {plan}, {plan.ranks} of {self.group.world} GPUs: {reason}")
            return divide_weights(network, mesh) if self.group.rank < plan.ranks else None, plan
        if plan is None:
            plan, reason = self.choose_once()
        if plan.ranks > 1:
            self.agree([plan])
        if plan.stages > 1:
            reason += f"; approximate after the first {plan.warmup} steps"
        print(
            f"parallel: {plan if plan.ranks > 1 else 'a GPU a picture'}, {plan.ranks if plan.ranks > 1 else min(self.pictures, self.group.world)} of "
            f"{self.group.world} GPUs: {reason}"
        )
        network = self.apply(plan)
        self.network = self.pieces = None  # or its memory would outlive it
        return network, plan

    def begin(self, network):
        """Take the network that the methods below work on, and wait for the collectives."""
        self.group.opened()
        self.network, self.pieces = network, network if hasattr(network, "tower") else PlainPieces(network)

    def choose_once(self):
        """`choose`, remembered: two plans that are equally fast round differently, and two runs are to give one picture."""
        (file, known), situation = _known_plans(), self.situation()
        found = self.group.tell("known plan", known.get(situation))[0]
        if found:
            return Plan(*found[0]), f"{found[1]}; measured before on this machine ({file})"
        plan, reason = self.choose()
        if self.group.rank == 0:
            _keep(file, {**_known_plans()[1], situation: [plan, reason]})
        return plan, reason

    def situation(self):
        """What a choice depends on, in words."""
        weights = next(iter(self.network.parameters()))
        hosts = "+".join(str(self.hosts.count(host)) for host in dict.fromkeys(self.hosts))
        name = (
            torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else f"processors of {torch.get_num_threads()} threads"
        )
        return (
            f"{hosts} {name}, code {kernels.version(kernels.FOLDER, Path(__file__).parent)}, torch {torch.__version__}: {self.pictures} pictures of {self.tokens} tokens, "
            f"{self.pieces.depth} blocks of {weights.shape[0]}, {type(self.network).__name__} {getattr(self.network, 'dtype', weights.dtype)}"
        )

    def exchanges(self):
        """Exchanges that all ranks can do, to be tried by `choose`."""
        if getattr(self.network, "dtype", None) == "terms":
            return ("ulysses",)
        return ("push", "kv", "ulysses") if self.peers() else ("kv", "ulysses")

    def peers(self):
        """Whether every rank's GPU can write into every other's."""
        peers = False
        if self.device.type == "cuda" and len(set(self.hosts)) == 1:
            here, others = self.device.index or 0, range(torch.cuda.device_count())
            peers = len(others) >= self.group.world and all(
                cuda.writes_to_peer(here, one) for one in others if one != here
            )
        return all(self.group.tell("peers", peers))

    def mesh(self, plan):
        """The mesh of a plan and the group of its ranks: made once a job, by all ranks in one order."""
        made = self.group.meshes
        key = plan.rows, plan.tokens, plan.stages
        if key not in made:
            everyone = dist.group.WORLD if plan.ranks == self.group.world else dist.new_group(list(range(plan.ranks)))
            made[key] = make_mesh(plan.rows, plan.tokens, self.device.type), everyone
        return made[key]

    def apply(self, plan, pieces=None):
        """The network as `plan` has it; None on a rank that it leaves idle."""
        if plan.ranks == 1:
            return self.network
        (mesh, everyone), pieces = self.mesh(plan), pieces or self.pieces
        if self.group.rank >= plan.ranks:
            return None
        if plan.stages > 1:
            return Pipelined(pieces, everyone, plan.patches, plan.warmup)
        key = plan.tokens, plan.rows, plan.exchange, pieces.alone
        if (
            plan.tokens > 1 and key not in self.group.exchanges
        ):  # one for all networks: what it has set up with its peers serves them all
            self.group.exchanges[key] = EXCHANGES[plan.exchange](mesh.get_group("tokens"), pieces.alone)
        return Sharded(pieces, mesh, self.group.exchanges[key] if plan.tokens > 1 else pieces.alone, everyone)

    def agree(self, plans):
        """Let every rank take the algorithms that rank 0 measured for its products, or two runs of one job could differ."""
        if self.device.type != "cuda" or getattr(self.network, "dtype", None) not in (torch.float16, torch.bfloat16):
            return
        sizes = {-(-2 * self.pictures // plan.rows) * self.tokens // plan.tokens for plan in plans if plan.ranks > 1}
        sizes |= {2 * self.pictures * self.tokens // plan.patches for plan in plans if plan.stages > 1}
        shapes = [shape for size in sorted(sizes) for shape in self.network.product_shapes(size)]
        mine = (
            [self.network.tuner.plain(*shape, self.network.dtype, self.device) for shape in shapes]
            if self.group.rank == 0
            else None
        )
        for shape, algorithm in zip(shapes, self.group.tell("products", mine)[0]):
            self.network.tuner.adopt(*shape, self.network.dtype, self.device, algorithm)

    @torch.no_grad()
    def milliseconds(self, plan):
        """Estimated time of a step of the network under `plan`, on this rank; 0 if it has nothing to do."""
        pictures = -(-self.pictures // self.group.world) if plan.ranks == 1 else self.pictures
        generator = torch.Generator(self.device).manual_seed(0)  # its own: the run's random stream begins untouched
        x = torch.randn(2 * pictures, 4, self.latent, self.latent, generator=generator, device=self.device)
        t, y = (
            torch.full((2 * pictures,), 500, device=self.device),
            torch.zeros(2 * pictures, dtype=torch.int64, device=self.device),
        )
        times, conditions = [], None
        if hasattr(self.pieces, "conditioning"):  # a run looks its vectors up; any will do here
            table = self.pieces.conditioning(t[:1], y[:1])
            conditions = SimpleNamespace(modulation=lambda t, y: Modulation(table, torch.zeros_like(t)))
        for depth in DEPTHS:
            pieces = self.pieces.shallow(depth)
            if plan.ranks == 1:
                pieces.attend = pieces.alone
                times.append(
                    _time(lambda: pieces.tower(pieces.embed(x), pieces.modulation(t, y, conditions)), self.device)
                )
                continue
            network = self.apply(plan, pieces)
            if network is None:
                return 0.0
            network.hoisted = conditions
            times.append(_time(lambda: network.forward_with_cfg(x, t, y, 4.0), self.device))
        short, long = times
        return short + (long - short) / (DEPTHS[1] - DEPTHS[0]) * (self.pieces.depth - DEPTHS[0])

    def choose(self):
        """(plan, reason): the fastest of the candidates, the same on every rank."""
        plans = candidates(self.pictures, self.group.world, self.tokens, self.heads, self.hosts, self.exchanges())
        self.agree(plans)
        for plan in plans:
            self.mesh(plan)
        # Twice, and the better of both: the first pass also warms up the GPU and the communicators.
        times = torch.tensor([[self.milliseconds(plan) for plan in plans] for _ in range(2)], device=self.device).amin(
            0
        )
        dist.all_reduce(times, dist.ReduceOp.MAX)
        self.pieces.attend = self.pieces.alone
        best = int(times.argmin())
        others = ", ".join(
            f"{plan if plan.ranks > 1 else 'a GPU a picture'} {ms:.2f}"
            for plan, ms in zip(plans, times.tolist())
            if plan != plans[best]
        )
        return plans[best], f"{float(times[best]):.2f} ms a step estimated" + (f"; {others}" if others else "")


def _known_plans():
    """The file of earlier choices, and what is in it."""
    file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dit" / "plans.json"
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        known = None
    return file, known if isinstance(known, dict) else {}  # absent or damaged: measured again


def _keep(file, known):
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with partial_file(file) as partial:
            partial.write_text(json.dumps(known, indent=1))
    except OSError:  # a read-only home: measured at every start
        pass


def _time(step, device):
    """Milliseconds of `step`: replayed from a graph on a GPU."""
    if device.type != "cuda":
        step()
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)
    from accel.graphs import capture

    replay = capture(step)
    replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    for mark in marks:
        mark.record()
        for _ in range(4):
            replay()
    torch.cuda.synchronize(device)
    return min(a.elapsed_time(b) for a, b in zip(marks, marks[1:])) / 4
