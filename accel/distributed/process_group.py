"""Ranks of several processes, on torch.distributed.

Objects and CPU tensors are exchanged over gloo, CUDA tensors over NCCL. The key-value store
contains the progress, the request to stop and the first failure.
"""

import hashlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from threading import Thread, Timer
from typing import Any

import torch
import torch.distributed as dist

from accel import launch
from accel.distributed import OFF, Layout, Placement, Ranks
from accel.distributed.exchanges import AllGather, Push
from accel.distributed.sharded import Sharded
from accel.errors import UsageError
from accel.kernels import cuda
from accel.runtime.network import BlockNetwork, Network

NOTICE_DELAY_S = 10  # until a rank reports that it waits for the other ranks
CONNECT_TIMEOUT = timedelta(minutes=10)
# A rank of an FID job may have more batches than another, which then waits.
EXCHANGE_TIMEOUT = timedelta(days=1)


class _SharedError(UsageError):
    """A UsageError that is raised on every rank."""


def connect(rank: int, world: int, local_rank: int) -> "DistributedRanks":
    """Create the process group at MASTER_ADDR:MASTER_PORT. Raises UsageError if ranks do not
    connect in time.
    """
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    others = f"the other {world - 1}" if world > 2 else f"rank {1 - rank}"
    notice = (
        f"rank {rank} of {world}: waits for {others} to connect at {address}, at most "
        f"{CONNECT_TIMEOUT.seconds // 60} minutes"
    )
    waiting = Timer(NOTICE_DELAY_S, print, [notice], {"file": sys.stderr})
    waiting.daemon = True
    waiting.start()
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=CONNECT_TIMEOUT))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":  # nodes count attempts differently
            # torchrun --max-restarts reuses its store, which contains the previous attempt.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
            store = dist.PrefixStore(f"attempt {attempt}", store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world,
            timeout=CONNECT_TIMEOUT,
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"rank {rank} of {world}: cannot connect at {address}; start all ranks ({reason})"
        ) from None
    finally:
        waiting.cancel()
    store.set_timeout(EXCHANGE_TIMEOUT)
    dist.group.WORLD.set_timeout(EXCHANGE_TIMEOUT)  # type: ignore[union-attr]
    # A clone: a store connection is not thread-safe.
    return DistributedRanks(rank, world, local_rank, dist.PrefixStore("job", store.clone()))


class DistributedRanks(Ranks):
    """A rank among several, created by `connect`. `claim_device` sets its `device`."""

    device: torch.device

    def __init__(self, rank: int, world: int, local_rank: int, store: dist.Store):
        self.rank = rank
        self.world = world
        self.local_rank = local_rank
        self._store = store
        self._connecting: Future | None = None
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}  # by ranks
        self._exchanges: dict[Sequence[int], AllGather] = {}  # by ranks

    # ---- the exchange of values ----

    def all_gather_object(self, value: Any) -> list:
        values = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def run_collectively(self, work: Callable[[], Any], only: int | None = None) -> Any:
        result = None
        message = None
        try:
            if only in (None, self.rank):
                result = work()
        except _SharedError:
            raise
        except UsageError as error:
            message = error.marked
        # Each distinct message once, with its ranks unless all ranks have it.
        reports = self.all_gather_object((message, socket.gethostname()))
        messages = dict.fromkeys(text for text, _ in reports if text is not None)
        lines: list[str] = []
        for message in messages:
            ranks = [rank for rank, (text, _) in enumerate(reports) if text == message]
            if len(ranks) < self.world and ranks != [only]:
                numbers = ", ".join(map(str, ranks))
                hosts = ", ".join(dict.fromkeys(reports[rank][1] for rank in ranks))
                message = f"rank{'s' * (len(ranks) > 1)} {numbers} on {hosts}: {message}"
            lines += message.splitlines()
        if lines:
            raise _SharedError("\n".join(lines))
        return result

    def add(self, amount: int) -> int:
        return self._store.add("counter", amount)

    # ---- devices and collectives ----

    def claim_device(self, wanted: str | None) -> str:
        """Choose the CPU, or a GPU that no other rank uses. Raises UsageError if there is none."""
        self.device = torch.device(self._choose_device(wanted))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        return str(self.device)

    def _choose_device(self, wanted):
        device_type, _, number = (wanted or "cuda").partition(":")
        if device_type == "cpu":
            return "cpu"
        if number:
            raise UsageError(
                "every rank takes its own GPU",
                "choose them with CUDA_VISIBLE_DEVICES",
                parameter="device",
                value=wanted,
            )
        visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
        # srun may hide all GPUs but the task's own, which is then number 0.
        index = self.local_rank % max(visible, 1)
        uuid = str(torch.cuda.get_device_properties(index).uuid) if visible else None
        gpus = self.all_gather_object((socket.gethostname(), uuid))
        if not (wanted or launch.IS_GPUS_RANK or any(uuid for _, uuid in gpus)):
            return "cpu"
        self.run_collectively(lambda: self._require_own_gpu(gpus))
        return f"cuda:{index}"

    def _require_own_gpu(self, gpus):
        """Raise UsageError unless this rank has its own GPU. gpus: (host, UUID) by rank."""
        _, uuid = gpus[self.rank]
        if uuid is None:
            raise UsageError(
                "this machine has 0 GPUs; start as many processes as there are GPUs, or use "
                "`device=cpu`"
            )
        if gpus.count(gpus[self.rank]) > 1:
            raise UsageError(
                "several ranks on one GPU; start one per GPU (--gpus, --nproc_per_node, "
                "--ntasks-per-node)"
            )

    def connect_collectives(self) -> None:
        if self.device.type == "cuda":  # NCCL needs a second to connect
            self._connecting = ThreadPoolExecutor(1).submit(self._connect_gpus)

    def _connect_gpus(self):
        torch.cuda.set_device(self.device)  # the current device is per thread
        dist.all_reduce(torch.zeros(1, device=self.device))  # the first collective connects

    def _wait_for_collectives(self):
        """Wait for `connect_collectives`."""
        if self._connecting is not None:
            self._connecting.result()

    def has_peer_access(self) -> bool:
        if self.device.type != "cuda":
            return False
        here = self.device.index or 0
        visible = torch.cuda.device_count()
        writes = visible >= self.world and all(
            cuda.writes_to_peer(here, gpu) for gpu in range(visible) if gpu != here
        )
        reports = self.all_gather_object((socket.gethostname(), writes))
        return writes and len(set(reports)) == 1

    # ---- network evaluations that ranks share ----

    def share(self, network: BlockNetwork, layout: Layout) -> Network:
        if layout == OFF:
            return network
        self._wait_for_collectives()
        mesh = self._group(range(layout.ranks))
        columns = layout.tokens
        if columns == 1:
            return Sharded(network, mesh) if self.rank < layout.ranks else network
        # Consecutive ranks split the tokens of a row: they are on one host if possible.
        neighbours = [range(first, first + columns) for first in range(0, layout.ranks, columns)]
        groups = [self._group(ranks) for ranks in neighbours]
        exchange = Push if self.has_peer_access() else AllGather  # a collective call
        if self.rank >= layout.ranks:
            return network
        row = self.rank // columns
        key = neighbours[row]
        if key not in self._exchanges:  # one for all networks: it has buffers in its peers' memory
            self._exchanges[key] = exchange(groups[row])
        return Sharded(network, mesh, self._exchanges[key])

    def _group(self, ranks):
        """Return the process group of `ranks`; a collective call when it creates the group."""
        if len(ranks) == self.world:
            return dist.group.WORLD
        if ranks not in self._groups:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            self._groups[ranks] = dist.new_group(list(ranks), backend=backend)
        return self._groups[ranks]

    def local_shard(self, latents: torch.Tensor, n: int, placement: Placement) -> torch.Tensor:
        if placement.layout == OFF:
            return latents
        digest = hashlib.sha256(latents.cpu().numpy().tobytes()).hexdigest()[:8]
        digests = self.all_gather_object(digest)[: placement.busy]
        if len(set(digests)) > 1:
            raise RuntimeError(
                f"ranks ended with different latents (checksums {', '.join(digests)}): are their "
                "GPUs of one kind?"
            )
        return latents[placement.pictures(n)]

    def gather_pictures(self, pictures: torch.Tensor, n: int, placement: Placement) -> torch.Tensor:
        slices = [placement._replace(rank=rank).pictures(n) for rank in range(self.world)]
        counts = [len(range(n)[part]) for part in slices]
        # Collectives need equal shapes.
        padded = pictures.new_zeros(max(counts), *pictures.shape[1:])
        padded[: len(pictures)] = pictures
        self._wait_for_collectives()
        parts = padded.new_empty(self.world, *padded.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    # ---- the end of a job ----

    @property
    def stopping(self) -> bool:
        if self._stop:
            self._store.set("stop", "")
        return self._stop or self._store.check(["stop"])

    def first_failure(self, status: int) -> tuple[int, int]:
        try:
            first = self._store.compare_set("failed", "", f"{self.rank} {status}")
        except dist.DistError:
            # The process that serves the store is gone: assume that rank 0 failed alike.
            return 0, status
        rank, status = map(int, first.split())
        return rank, status

    def leave(self) -> None:
        """Wait for all ranks and close the process group. Afterwards exit with `os._exit`: at
        interpreter shutdown gloo's threads may abort, and NCCL waits for CUDA graphs.
        """
        self._wait_for_collectives()
        dist.barrier()
        # The launcher sends SIGTERM when the first rank exits.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        closing = Thread(target=self._close, daemon=True)
        closing.start()
        closing.join(5)

    def _close(self):
        if self._connecting is not None:
            torch.cuda.set_device(self.device)
        dist.destroy_process_group()
