"""The process groups of layouts, and a network as the ranks of a layout evaluate it."""

from functools import partial

import torch
import torch.distributed as dist

from accel.kernels import cuda
from accel.network import WHOLE, BlockNetwork, Network, Part
from accel.parallel.exchanges import EXCHANGES
from accel.parallel.layouts import Layout
from accel.parallel.processes import Job
from accel.parallel.sharded import Sharded


class Groups:
    """The process groups of a job's ranks on `device`. Each is made once, by every rank,
    in the same order.
    """

    def __init__(self, job: Job, device: torch.device):
        self.job = job
        self.device = device
        self._groups = {}
        self._exchanges = {}  # by their ranks

    def part(self, layout: Layout | None) -> Part:
        """Return the part of the weights that this rank loads. An idle rank loads one
        too: it chooses GEMMs with the others.
        """
        if layout is None or layout.weights == 1:
            return WHOLE
        self.job.wait_for_collectives()
        group = self._group(range(layout.ranks))
        rank = self.job.rank
        if rank >= layout.ranks:
            return Part(0, layout.ranks, lambda x: None)
        return Part(rank, layout.ranks, partial(dist.all_reduce, group=group))

    def apply(self, network: BlockNetwork, layout: Layout) -> Network:
        """Return the network as this rank evaluates it under `layout`. Return it
        unchanged if this rank shares no evaluation, or if the ranks divide the weights:
        then it was loaded in parts.
        """
        if layout.ranks == 1 or layout.weights > 1:
            return network
        everyone = self._group(range(layout.ranks))
        size = layout.tokens
        # on one host if they fit
        neighbours = [range(first, first + size) for first in range(0, layout.ranks, size)]
        groups = [self._group(ranks) for ranks in neighbours] if size > 1 else []
        if self.job.rank >= layout.ranks:
            return network
        if size == 1:
            return Sharded(network, everyone)
        row = self.job.rank // size
        key = neighbours[row], layout.exchange
        if key not in self._exchanges:  # one for all networks: it has buffers in its peers' memory
            self._exchanges[key] = EXCHANGES[layout.exchange](groups[row])
        return Sharded(network, everyone, self._exchanges[key])

    def _group(self, ranks):
        if len(ranks) == self.job.world:
            return dist.group.WORLD
        if ranks not in self._groups:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            self._groups[ranks] = dist.new_group(list(ranks), backend=backend)
        return self._groups[ranks]

    def peers(self) -> bool:
        """Return whether every rank's GPU can write into every other's memory."""
        if self.device.type != "cuda":
            return False
        here = self.device.index or 0
        others = range(torch.cuda.device_count())
        peers = len(others) >= self.job.world and all(
            cuda.writes_to_peer(here, gpu) for gpu in others if gpu != here
        )
        ranks = self.job.all_gather_object((self.job.host, peers))
        return len({host for host, _ in ranks}) == 1 and all(peers for _, peers in ranks)
