"""Ranks: this process among the processes of one job.

A process by itself is a world of one: nothing is exchanged, and nothing is imported.
launched.py joins the ranks that torchrun, srun or --gpus started. Their class, in
distributed.py, also shares network evaluations. Imports no torch.
"""

import signal
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from accel.errors import UsageError, require_equal

if TYPE_CHECKING:  # torch is slow to import
    from torch import Tensor

    from accel.distributed.placement import Layout, Placement
    from accel.runtime.network import BlockNetwork, Network


def require_device(wanted: str | None) -> None:
    """Raise UsageError for a device on which ranks do not sample. None is left open."""
    device_type, _, number = (wanted or "cuda").partition(":")
    if device_type not in ("cuda", "cpu") or number and not number.isdecimal():
        raise UsageError(
            "ranks sample on cuda or cpu", "choose one", parameter="device", value=wanted
        )


class FirstFailure(NamedTuple):
    """The rank of a job that failed first, and its exit status."""

    rank: int
    status: int


class Ranks:
    """A world of one process, and what all ranks do. Every rank of a job makes the same calls."""

    rank = 0
    world = 1
    local_rank = 0

    def __init__(self) -> None:
        self._counter = 0
        self._stop = False

    # ---- the exchange of values ----

    def all_gather_object(self, value: Any) -> list:
        """Return every rank's `value` (anything that pickles), by rank."""
        return [value]

    def run_collectively(self, work: Callable[[], Any], only: int | None = None) -> Any:
        """Call `work` on every rank, or on rank `only`, and return its result there.

        A UsageError on any rank is raised on every rank, each different message once with
        its ranks: a mistake on one node ends the job before any work. `work` may itself
        call this method, on every rank.
        """
        return work()

    def run_in_turns(self, work: Callable[[], Any]) -> Any:
        """Call `work` on rank 0, then on one rank of each other node, then on the others:
        a download happens once if the file system is shared, else once per node.
        Otherwise as `run_collectively`.
        """
        result = self.run_collectively(work, only=0)
        for first_of_node in (True, False):
            my_turn = self.rank > 0 and (self.local_rank == 0) == first_of_node
            result = self.run_collectively(lambda: work() if my_turn else result)
        return result

    def from_rank_0(self, make: Callable[[], Any]) -> Any:
        """Return on every rank the result of `make` on rank 0."""
        return self.all_gather_object(self.run_collectively(make, only=0))[0]

    def require_equal(self, settings: dict, free: Set[str] = frozenset()) -> None:
        """Raise UsageError on every rank if one has other settings than rank 0. free: names
        that may differ.
        """
        first = self.from_rank_0(lambda: settings)
        remedy = "start all ranks with the same flags and files"
        self.run_collectively(lambda: require_equal(settings, first, free, "rank 0 has", remedy))

    def add(self, amount: int) -> int:
        """Add to the counter that all ranks share. Return its value."""
        self._counter += amount
        return self._counter

    # ---- devices ----

    def claim_device(self, wanted: str | None) -> str | None:
        """Return the name of this rank's device. wanted: as the user gave it. A process by
        itself may take any.
        """
        return wanted

    def has_peer_access(self) -> bool:
        """Return whether every rank's GPU can write into every other's memory."""
        return False

    # ---- network evaluations that ranks share ----

    def connect_collectives(self) -> None:
        """Start to connect the GPUs in a thread, while weights are loaded. Here: no-op."""

    def share(self, network: "BlockNetwork", layout: "Layout") -> "Network":
        """Return the network as this rank evaluates it under `layout`. Return it unchanged
        if this rank shares no evaluation. Every rank calls this: all make the process groups,
        in one order.
        """
        return network

    def local_shard(self, latents: "Tensor", n: int, placement: "Placement") -> "Tensor":
        """Return the latents of this rank's own pictures, of n. latents: of the slices
        `placement.batches`. Raises RuntimeError if ranks that share evaluations computed
        different latents.
        """
        return latents

    def gather_pictures(self, pictures: "Tensor", n: int, placement: "Placement") -> "Tensor":
        """Gather every rank's own pictures (n', …) and return all of them (n, …)."""
        return pictures

    # ---- the end of a job ----

    def stop_on_signals(self, *signals: signal.Signals) -> None:
        """Take each of these signals, on any rank, as a request that the whole job stop. Leave
        those that are ignored, as by nohup.
        """
        for number in signals:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def _on_signal(self, *_):
        self._stop = True  # no lock and no store: a second signal may interrupt this very line

    @property
    def stopping(self) -> bool:
        """Return whether any rank was asked to stop; ranks check this between batches."""
        return self._stop

    def first_failure(self, status: int) -> FirstFailure:
        """Record that this rank failed with `status`. Return the rank that failed first."""
        return FirstFailure(self.rank, status)

    def leave(self) -> None:
        """Wait for all ranks and leave the job."""
