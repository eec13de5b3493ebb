"""Split each network evaluation over a mesh of rows × columns ranks.

    rows      split the batch, which guidance doubles: no exchange until the output is gathered
    columns   split the tokens from the patch embedding to the last layer: each attention layer
              gathers keys and values

The output is gathered on all ranks. Guidance, sampler and noise then run on every rank with the
same values, so the sampling loop and the random stream do not depend on the layout.
"""

from collections.abc import Callable, Hashable

import torch
import torch.distributed as dist

from accel.distributed.exchanges import AllGather
from accel.runtime.network import BlockNetwork, Network, RunState


class Sharded(Network[RunState]):
    """A network that all ranks of `group` evaluate together: same inputs, same outputs.

    Consecutive ranks of the group form a row of the mesh. exchange: gathers keys and values
    within a row; None for one column.
    """

    # Shared evaluations are short: CUDA graphs pay off in every tier.
    captures = True

    def __init__(
        self, network: BlockNetwork, group: dist.ProcessGroup, exchange: AllGather | None = None
    ):
        self.network = network
        self.group = group
        self.patch_size = network.patch_size
        self.in_channels = network.in_channels
        self.attend = exchange or network.attention
        self.columns = exchange.size if exchange else 1
        self.rows = dist.get_world_size(group) // self.columns
        self.row, self.column = divmod(dist.get_rank(group), self.columns)

    @property
    def parts(self) -> list[BlockNetwork]:
        return [self.network]

    @torch.no_grad()
    def forward_tokens(
        self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor, run: RunState | None = None
    ) -> torch.Tensor:
        n = len(y)
        share = -(-n // self.rows)  # batch rows per rank
        first = self.row * share
        # Pad with the last row: collectives need equal shapes.
        mine = torch.arange(first, first + share, device=x.device).clamp(max=n - 1)
        total = (x.shape[-1] // self.patch_size) ** 2
        length = total // self.columns  # tokens per rank
        part = slice(self.column * length, (self.column + 1) * length)
        h = self.network.embed(x[mine % len(x)], part)  # (share, t, D)
        condition = (run or self.network).condition(t[mine], y[mine])
        out = self.network.forward_blocks(h, condition, self.attend, part)
        return self._gather(out.contiguous())[:n]  # of rows · share

    def _gather(self, out):
        """Gather the outputs (share, t, p·p·C') of all ranks → (rows · share, T, p·p·C')."""
        ranks = self.rows * self.columns
        parts = out.new_empty(ranks, *out.shape)  # (ranks, share, t, p·p·C')
        dist.all_gather_into_tensor(parts.flatten(0, 1), out, group=self.group)
        parts = parts.unflatten(0, (self.rows, self.columns))
        # (rows, share, columns, t, p·p·C')
        return parts.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def prepare(self, times: list[float], labels: list[int], at_once: int = 1) -> RunState:
        return self.network.prepare(times, labels, at_once)

    def graphed(self, key: Hashable, step: Callable) -> Callable:
        # The network owns the graphs and drops them when they become invalid.
        return self.network.graphed((self, key), step)

    def overflowed(self) -> str | None:
        return self.network.overflowed()
