"""Ranks of a distributed job, and how they divide its work. Imports no torch.

launched.py        joins the job that torchrun, srun or --gpus started
process_group.py   DistributedRanks: the same interface on torch.distributed
layouts.py         chooses the layout of --parallel
sharded.py         one network evaluation on several GPUs; exchanges.py: its attention
"""

import signal
from collections.abc import Callable, Set
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from accel.errors import require_equal

if TYPE_CHECKING:  # torch is slow to import
    from torch import Tensor

    from accel.runtime.network import BlockNetwork, Network


class Layout(NamedTuple):
    """A grid of rows × tokens ranks that divide each network evaluation. 1 × 1: data parallel."""

    rows: int = 1  # number of parts of the batch
    tokens: int = 1  # number of parts of each row's tokens

    @property
    def ranks(self) -> int:
        """Number of ranks that share a network evaluation."""
        return self.rows * self.tokens

    def __str__(self):
        if self == OFF:
            return "one rank per picture"
        given = {name: value for name, value in self._asdict().items() if value > 1}
        return ",".join(f"{name}={value}" for name, value in given.items())


OFF = Layout()


class Placement(NamedTuple):
    """The share of one of `world` ranks under `layout`. Default: a single process."""

    layout: Layout = OFF
    world: int = 1
    rank: int = 0

    @property
    def busy(self) -> int:
        """Number of ranks that are not idle."""
        return self.world if self.layout == OFF else self.layout.ranks

    def pictures(self, n: int) -> slice:
        """Return the slice of n pictures that this rank decodes: about equal sizes, in rank
        order; empty if idle.
        """
        return slice(ceil(n * self.rank / self.busy), ceil(n * (self.rank + 1) / self.busy))

    def batches(self, n: int, batch_size: int | None = None) -> list[slice]:
        """Return the batches that this rank denoises, as slices of n pictures: of its own
        pictures, or of all pictures if ranks share evaluations. batch_size: the most per slice.
        """
        pictures = self.pictures(n)
        if self.layout != OFF and self.rank < self.busy:
            pictures = slice(n)
        first, end, _ = pictures.indices(n)
        size = batch_size or max(1, end - first)
        return [slice(start, min(start + size, end)) for start in range(first, end, size)]

    def sizes(self, n: int, batch_size: int | None = None) -> set[int]:
        """Return the distinct sizes of the batches of all ranks."""
        return {
            batch.stop - batch.start
            for rank in range(self.busy)
            for batch in self._replace(rank=rank).batches(n, batch_size)
        }

    def rows(self, pictures: int, copies: int) -> tuple[int, int]:
        """Return the shape (latents, rows per latent) of this rank's batch when `pictures` are
        evaluated with `copies` batch rows each.
        """
        if self.layout == OFF:
            return pictures, copies
        return ceil(copies * pictures / self.layout.rows), 1


class Ranks:
    """The interface of ranks, for one process. All ranks of a job make the same calls in order."""

    rank = 0
    world = 1
    local_rank = 0
    _counter = 0
    _stop = False

    # ---- the exchange of values ----

    def all_gather_object(self, value: Any) -> list:
        """Gather one picklable `value` from each rank, in rank order."""
        return [value]

    def run_collectively(self, work: Callable[[], Any], only: int | None = None) -> Any:
        """Call `work` on every rank, or only on rank `only`, and return its result there.

        If a rank raises UsageError, all ranks raise it: the job ends before any work. Each
        distinct message appears once, with its ranks. Calls may be nested.
        """
        return work()

    def run_in_turns(self, work: Callable[[], Any]) -> Any:
        """Call `work` on rank 0, then on the first rank of each other node, then on the rest.

        A download thus runs once on a shared file system, else once per node. Errors as in
        `run_collectively`.
        """
        result = self.run_collectively(work, only=0)
        for first_of_node in (True, False):
            my_turn = self.rank > 0 and (self.local_rank == 0) == first_of_node
            result = self.run_collectively(lambda: work() if my_turn else result)
        return result

    def from_rank_0(self, make: Callable[[], Any]) -> Any:
        """Call `make` on rank 0 and broadcast its result."""
        return self.all_gather_object(self.run_collectively(make, only=0))[0]

    def require_equal(self, settings: dict, free: Set[str] = frozenset()) -> None:
        """Raise UsageError on every rank if settings differ between ranks. free: names of
        settings that may differ.
        """
        first = self.from_rank_0(lambda: settings)
        remedy = "start all ranks with the same flags and files"
        self.run_collectively(lambda: require_equal(settings, first, free, "rank 0 has", remedy))

    def add(self, amount: int) -> int:
        """Add to a counter shared by all ranks and return its new value."""
        self._counter += amount
        return self._counter

    # ---- devices ----

    def claim_device(self, wanted: str | None) -> str | None:
        """Choose this rank's device and return its name. wanted: the user's --device."""
        return wanted

    def has_peer_access(self) -> bool:
        """Return whether each GPU can write into the memory of every other GPU of the job."""
        return False

    # ---- network evaluations that ranks share ----

    def connect_collectives(self) -> None:
        """Connect the GPUs in a background thread while weights are loaded."""

    def share(self, network: "BlockNetwork", layout: Layout) -> "Network":
        """Wrap the network for shared evaluations under `layout`; unchanged on a rank outside it.

        All ranks must call this, because creating process groups is collective.
        """
        return network

    def local_shard(self, latents: "Tensor", n: int, placement: Placement) -> "Tensor":
        """Select the latents that this rank decodes, of n pictures. latents: of the slices
        `placement.batches(n)`. Raises RuntimeError if ranks that share evaluations disagree.
        """
        return latents

    def gather_pictures(self, pictures: "Tensor", n: int, placement: Placement) -> "Tensor":
        """Concatenate the shards (n', …) of all ranks to (n, …) on every rank."""
        return pictures

    # ---- the end of a job ----

    def stop_on_signals(self, *signals: signal.Signals) -> None:
        """On each of these signals, on any rank, ask the whole job to stop. Signals that are
        ignored (nohup) stay ignored.
        """
        for number in signals:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def _on_signal(self, *_):
        self._stop = True  # no lock and no store: a second signal may interrupt this line

    @property
    def stopping(self) -> bool:
        """Whether any rank was asked to stop. Ranks check this between batches."""
        return self._stop

    def first_failure(self, status: int) -> tuple[int, int]:
        """Record that this rank failed with exit status `status`. Return the rank that failed
        first, and its exit status.
        """
        return self.rank, status

    def leave(self) -> None:
        """Wait for all ranks, then leave the job."""
