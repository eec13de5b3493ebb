"""The process groups of layouts, and a network as the ranks of a layout evaluate it."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accel.kernels import cuda
from accel.network import BlockNetwork, Network
from accel.parallel.exchanges import EXCHANGES
from accel.parallel.layouts import Layout
from accel.parallel.processes import Job
from accel.parallel.sharded import Sharded


class Groups:
    """The process groups of a job's ranks on `device`. Each is made once, by every rank, in the same order."""

    def __init__(self, job: Job, device: torch.device):
        self.job, self.device = job, device
        self._groups, self._exchanges = {}, {}  # by their ranks

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
        """Whether every rank's GPU can write into every other's."""
        if self.device.type != "cuda":
            return False
        here, others = self.device.index or 0, range(torch.cuda.device_count())
        peers = len(others) >= self.job.world and all(cuda.writes_to_peer(here, gpu) for gpu in others if gpu != here)
        ranks = self.job.all_gather_object((self.job.host, peers))
        return len({host for host, _ in ranks}) == 1 and all(peers for _, peers in ranks)
