"""Divide each network evaluation among many GPUs.

Its batch rows, which guidance doubles, and their tokens are divided over rows × columns of ranks:

    ranks of a column   divide the batch rows: nothing is exchanged until the evaluation ends
    ranks of a row      divide the tokens, from the patch embedding to the last layer: attention
                        gathers keys and values

The output is gathered once. Guidance, sampler and noise then run on every rank alike, on the same
numbers: the random stream and the sampling loop do not depend on this module.
"""

from collections.abc import Callable, Hashable

import torch
import torch.distributed as dist

from accel.distributed.exchanges import AllGather
from accel.runtime.network import BlockNetwork, Network, RunState


class Sharded(Network[RunState]):
    """A network that several ranks evaluate: all call it with the same tensors, and get the same.

    everyone: the group of these ranks; ranks that share the tokens of the same batch rows are
    neighbours in it. exchange: among such neighbours; None if every rank has whole rows.
    """

    # Shared evaluations are short enough for launches to count, also of a plain network.
    captures = True

    def __init__(
        self, network: BlockNetwork, everyone: dist.ProcessGroup, exchange: AllGather | None = None
    ):
        self.network = network
        self.everyone = everyone
        self.patch_size = network.patch_size
        self.in_channels = network.in_channels
        self.attend = exchange or network.attention
        self.columns = exchange.size if exchange else 1  # ranks that divide the tokens of a row
        self.rows = dist.get_world_size(everyone) // self.columns
        self.row, self.column = divmod(dist.get_rank(everyone), self.columns)

    @property
    def parts(self) -> list[BlockNetwork]:
        return [self.network]

    @torch.no_grad()
    def forward_tokens(
        self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor, run: RunState | None = None
    ) -> torch.Tensor:
        n = len(y)
        share = -(-n // self.rows)  # batch rows of a rank
        first = self.row * share
        # The last share is filled up with the last row: collectives want equal shapes.
        mine = torch.arange(first, first + share, device=x.device).clamp(max=n - 1)
        total = (x.shape[-1] // self.patch_size) ** 2
        length = total // self.columns  # tokens of a rank
        part = slice(self.column * length, (self.column + 1) * length)
        h = self.network.embed(x[mine % len(x)], part)  # (share, t, D)
        condition = (run or self.network).condition(t[mine], y[mine])
        out = self.network.forward_blocks(h, condition, self.attend, part)
        whole = self._gather(out.contiguous())  # (rows · share, T, p·p·C')
        return whole[:n]

    def _gather(self, out):
        """Gather the ranks' tokens (share, t, p·p·C') → (rows · share, T, p·p·C')."""
        ranks = self.rows * self.columns
        parts = out.new_empty(ranks, *out.shape)  # (ranks, share, t, p·p·C')
        dist.all_gather_into_tensor(parts.flatten(0, 1), out, group=self.everyone)
        parts = parts.unflatten(0, (self.rows, self.columns))
        # (rows, share, columns, t, p·p·C')
        return parts.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def prepare(self, times: list[float], labels: list[int], at_once: int = 1) -> RunState:
        return self.network.prepare(times, labels, at_once)

    def graphed(self, key: Hashable, step: Callable) -> Callable:
        # The network drops its graphs when they become void.
        return self.network.graphed((self, key), step)

    def overflowed(self) -> str | None:
        return self.network.overflowed()
