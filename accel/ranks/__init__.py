"""Ranks: this process among the processes of one job.

A process by itself is a world of one: nothing is exchanged, and nothing is imported.
launched.py joins the ranks that torchrun, srun or --gpus started (distributed.py).
Imports no torch.
"""

import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from accel.errors import UsageError
from accel.ranks.placement import OFF, Layout, Placement

if TYPE_CHECKING:  # torch is slow to import
    import torch

    from accel.network import BlockNetwork, Network


def require_device(wanted: str | None) -> None:
    """Raise UsageError for a device on which ranks do not sample. None is left open."""
    device_type, _, number = (wanted or "cuda").partition(":")
    if device_type not in ("cuda", "cpu") or number and not number.isdecimal():
        raise UsageError(f"`device={wanted}`: ranks sample on cuda or cpu; choose one")


class FirstFailure(NamedTuple):
    """The rank of a job that failed first, and its exit status."""

    rank: int
    status: int


class Ranks:
    """A world of one process, and the interface of all ranks. Every rank of a job makes the
    same calls.

    device: the device of this rank, once it is known.
    """

    rank = 0
    world = 1
    local_rank = 0

    def __init__(self, device: "torch.device | None" = None):
        self.device = device
        self._counters: Counter[str] = Counter()
        self._stop = False

    @property
    def host(self) -> str:
        """Return the name of this machine."""
        return socket.gethostname()

    # ---- the exchange of values ----

    def barrier(self) -> None:
        """Wait until every rank calls this."""

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
        return work()

    def from_rank_0(self, make: Callable[[], Any]) -> Any:
        """Return on every rank the result of `make` on rank 0."""
        return make()

    def require_equal(self, settings: dict, free: Set[str] = frozenset()) -> None:
        """Raise UsageError on every rank if one has other settings than rank 0. free: names
        that may differ.
        """

    def max_over_ranks(self, values: Iterable[float]) -> list[float]:
        """Return the elementwise maximum of `values` over the ranks."""
        return list(values)

    def add(self, counter: str, amount: int) -> int:
        """Add to a counter that all ranks share. Return its value."""
        self._counters[counter] += amount
        return self._counters[counter]

    # ---- devices and collectives ----

    def take_device(self, wanted: str | None) -> str | None:
        """Return the name of this rank's device. wanted: as the user gave it. A process by
        itself may take any.
        """
        return wanted

    def open_collectives(self) -> None:
        """Start to connect the GPUs in a thread, while weights are loaded."""

    def wait_for_collectives(self) -> None:
        """Wait until `open_collectives` is done."""

    def peers(self) -> bool:
        """Return whether every rank's GPU can write into every other's memory."""
        return False

    # ---- network evaluations that ranks share ----

    def placement(self, layout: Layout = OFF) -> Placement:
        """Return the pictures, batch rows and tokens of this rank under `layout`."""
        return Placement(layout, self.world, self.rank)

    def share(self, network: "BlockNetwork", layout: Layout) -> "Network":
        """Return the network as this rank evaluates it under `layout`."""
        return network

    def own_pictures(self, latents: "torch.Tensor", n: int, placement: Placement) -> "torch.Tensor":
        """Return the latents of this rank's own pictures, of n. latents: of the slices
        `placement.batches`. Raises RuntimeError if ranks that share evaluations computed
        different latents.
        """
        return latents

    def gather_pictures(
        self, pictures: "torch.Tensor", n: int, placement: Placement
    ) -> "torch.Tensor | None":
        """Gather every rank's own pictures (n', …). Return all pictures (n, …) on rank 0,
        None elsewhere.
        """
        return pictures

    # ---- the end of a job ----

    def stop_on_signals(self, *signals: signal.Signals) -> None:
        """Take each of these signals, on any rank, as a request that the whole job stop."""
        for number in signals:
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
