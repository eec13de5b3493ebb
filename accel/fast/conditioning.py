"""Conditioning taken out of the denoising loop.

Every shift, scale and gate depends on (timestep, label) alone (DiT, arXiv:2212.09748,
section 3.2), and a third of XL/2's weights compute nothing else. A run knows its
timesteps and labels ahead, so a few large float32 GEMMs compute the vectors for many
steps at once, and the loop looks them up by an index on the device. The null label is
computed once, not once a picture.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from accel.fast.reader import Reader
from accel.kernels.adaln import Modulation
from accel.precision import true_float32

MOST_EVALUATIONS = 4096  # of a run: two a step, of 1000 at most
TABLE_BYTES = 256 << 20  # on XL/2: 38 steps for eight labels and the null label


class Conditioning:
    """(t, y) → the modulation vectors of all blocks and of the final layer, from a state
    dict.

    Vector 6i + j is block i's j-th of shift, scale, gate of attention, then of the MLP;
    the last two are the final layer's shift and scale. layers: the names of the adaLN
    projections, in that order. sinusoid(t, width): the embedding of t. dtype: of the
    projections' weights in memory, if it is another than the stream's.

    Ranks that divide the weights hold a part of the projections' rows each, and sum their
    results.
    """

    def __init__(
        self,
        read: Reader,
        layers: list[str],
        sinusoid: Callable[[torch.Tensor, int], torch.Tensor],
        dtype: torch.dtype | None = None,
    ):
        self.part = read.part
        self.sinusoid = sinusoid
        self.time_mlp = [
            read(f"t_embedder.mlp.{i}.{kind}") for i in (0, 2) for kind in ("weight", "bias")
        ]
        self.labels = read("y_embedder.embedding_table.weight")  # (classes + 1, C)
        weights = [read.mapped(f"{layer}.weight") for layer in layers]  # each (·D, C)
        self.width = len(weights[-1]) // 2
        rows = sum(map(len, weights))
        self.vectors = rows // self.width
        self.own = slice(
            rows * self.part.rank // self.part.ranks, rows * (self.part.rank + 1) // self.part.ranks
        )
        # (V·D / ranks,)
        self.bias = torch.cat([read(f"{layer}.bias") for layer in layers])[self.own]
        # Filled layer by layer: concatenating would hold the 0.9 GB of XL/2 twice.
        self.weight = self.bias.new_empty(len(self.bias), self.labels.shape[1], dtype=dtype)
        first = 0
        for weight in weights:
            mine, these = self._own_rows(first, first + len(weight))
            self.weight[mine] = weight[these]
            first += len(weight)

    def _own_rows(self, first, last):
        """Return this rank's part of the projections' rows `first` to `last` as two
        slices: counted from this rank's first row, and from `first`.
        """
        start = max(first, self.own.start)
        stop = max(start, min(last, self.own.stop))
        return slice(start - self.own.start, stop - self.own.start), slice(
            start - first, stop - first
        )

    def parameters(self) -> Iterator[torch.Tensor]:
        """Return all tensors that depend on the weights."""
        return iter((*self.time_mlp, self.labels, self.bias, self.weight))

    def __call__(
        self, t: torch.Tensor, y: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the vectors of timesteps t (E,) and labels y (E,) → (E, V, D), into
        `out` if given. Without TF32.
        """
        w0, b0, w2, b2 = self.time_mlp
        sinusoid = self.sinusoid(t, w0.shape[1]).to(self.bias.dtype)  # (E, 256)
        if out is None:
            out = self.bias.new_empty(len(t), self.vectors, self.width)
        if self.part.ranks > 1:
            out.zero_()
        with true_float32():
            # (E, C)
            condition = F.linear(F.silu(F.linear(sinusoid, w0, b0)), w2, b2) + self.labels[y]
            condition = F.silu(condition)
            rows = out.flatten(1)[:, self.own]  # (E, C), (E, V·D / ranks)
            # Weights in another dtype are converted in turn: all of them at once would
            # take the memory that was saved.
            turn = len(self.bias) if self.weight.dtype == self.bias.dtype else 6 * self.width
            for part in (slice(first, first + turn) for first in range(0, len(self.bias), turn)):
                weight = self.weight[part].to(self.bias.dtype)
                torch.addmm(self.bias[part], condition, weight.t(), out=rows[:, part])
        return self.part.sum(out)

    def fold(self, vector: int, gain: torch.Tensor) -> None:
        """Let scale `vector` multiply by gain (D,) too: gain·(1 + scale) − 1 takes
        scale's place. So the weight of a norm costs nothing in the loop.
        """
        mine, these = self._own_rows(vector * self.width, (vector + 1) * self.width)
        self.weight[mine] *= gain[these, None]
        self.bias[mine] = gain[these] * (1 + self.bias[mine]) - 1


class ConditioningTable:
    """The modulation vectors of a run, at fixed addresses: captured graphs outlive a
    change of times and labels.

    `begin(times, labels)` starts a run, `advance(i)` puts the run's i-th evaluation into
    the table, and the loop calls `modulation(index, y)`, two look-ups on the device. A
    pair outside the table finds a row of NaN, so that a wrong order of calls never makes
    a picture.
    """

    def __init__(self, conditioning: Conditioning, table_bytes: int = TABLE_BYTES, least: int = 1):
        """Allocate the table. least: minimum number of entries, even above `table_bytes`."""
        c = self.conditioning = conditioning
        self.usual = max(1, table_bytes // (c.vectors * c.width * c.bias.element_size()))  # entries
        self.capacity = max(self.usual, least)
        with torch.inference_mode(False):  # later callers may be in another mode
            self.table = c.bias.new_empty(self.capacity + 1, c.vectors, c.width)
            self.table[-1] = torch.nan
            # Two offsets add up to an entry. Pairs outside the table have the offset
            # `capacity`, the row of NaN.
            self.offset = torch.full((MOST_EVALUATIONS,), self.capacity, device=c.bias.device)
            self.label_offset = torch.full((len(c.labels),), self.capacity, device=c.bias.device)

    def begin(self, times: list[float], labels: list[int], at_once: int = 1) -> None:
        """Start a run; arguments as Network.schedule has them."""
        device = self.table.device
        # Uploaded once: the loop never waits for the host.
        self.times = torch.tensor(list(times), device=device)
        self.labels = torch.tensor(sorted(set(labels)), device=device)
        self.label_offset.fill_(self.capacity)
        self.label_offset[self.labels] = torch.arange(len(self.labels), device=device)
        # By the usual size, not a larger batch's: GEMMs round by the size of a chunk, and
        # a restarted job must give the same bits.
        self.chunk = max(self.usual // len(self.labels), at_once)
        self.ready = range(0)
        self.advance(0)

    def advance(self, index: int, *more: int) -> None:
        """Fill the table from the run's `index`-th evaluation on, if that or one of
        `more` is not in it.
        """
        if all(i in self.ready for i in (index, *more)):
            return
        self.ready = range(index, min(index + self.chunk, len(self.times)))
        times = self.times[index : self.ready.stop]  # (S,)
        entries = len(times) * len(self.labels)
        t = times[:, None].expand(-1, len(self.labels)).flatten()  # (E,)
        self.conditioning(t, self.labels.repeat(len(times)), out=self.table[:entries])
        self.offset.fill_(self.capacity)
        self.offset[index : self.ready.stop] = torch.arange(len(times), device=t.device) * len(
            self.labels
        )

    def modulation(self, index: torch.Tensor, y: torch.Tensor) -> Modulation:
        """Return where each batch row finds its vectors. index (N,): of the run's
        evaluations; y (N,): labels.
        """
        return Modulation(
            self.table, (self.offset[index] + self.label_offset[y]).clamp(max=self.capacity)
        )
