"""Conditioning taken out of the denoising loop.

Every shift, scale and gate depends on (timestep, label) alone (DiT, arXiv:2212.09748,
section 3.2), and a third of XL/2's weights compute nothing else. A run knows its timesteps and
labels ahead. So a few large float32 GEMMs compute the vectors for many steps at once, and the
loop looks them up by an index on the device. The null label is computed once, not once per picture.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.fast.ops import Float32Linear, GemmWeights, splits
from accel.fast.reader import Reader
from accel.kernels.adaln import Modulation
from accel.runtime.network import RunState
from accel.runtime.precision import true_float32

BLOCK_VECTORS = 6  # of a block: shift, scale, gate of attention, then of the MLP
MAX_EVALUATIONS = 4096  # of a run: two per step, of at most 1000 steps
TABLE_BYTES = 256 << 20  # on XL/2: 38 steps for eight labels and the null label


class Conditioning:
    """(t, y) → the modulation vectors of all blocks and of the final layer, from a state dict.

    Vector 6i + j is block i's j-th of shift, scale, gate of attention, then of the MLP; the last
    two are the final layer's shift and scale. layers: the names of the adaLN projections, in that
    order. sinusoid(t, width): the embedding of t. dtype: of the projections' weights in memory,
    if it is not the stream's. gemms: over the picture's tokens, of a modulation by token.
    """

    gemms: tuple[Any, ...] = ()

    def __init__(
        self,
        read: Reader,
        layers: list[str],
        sinusoid: Callable[[Tensor, int], Tensor],
        dtype: torch.dtype | None = None,
    ):
        self.sinusoid = sinusoid
        self.time_mlp = [
            read("t_embedder.mlp.0.weight"),
            read("t_embedder.mlp.0.bias"),
            read("t_embedder.mlp.2.weight"),
            read("t_embedder.mlp.2.bias"),
        ]
        self.labels = read("y_embedder.embedding_table.weight")  # (classes + 1, C)
        weights = [read.original(f"{layer}.weight") for layer in layers]  # each (·D, C)
        self.width = len(weights[0]) // BLOCK_VECTORS
        self.bias = torch.cat([read(f"{layer}.bias") for layer in layers])  # (V·D,)
        self.vectors = len(self.bias) // self.width
        # Filled layer by layer: concatenating would hold the 0.9 GB of XL/2 twice.
        self.weight = self.bias.new_empty(len(self.bias), self.labels.shape[1], dtype=dtype)
        for rows, weight in zip(self.weight.split([*map(len, weights)]), weights):
            rows.copy_(weight)
        self.layer: Float32Linear | None = None

    def freeze(self) -> None:
        """Take the projections as they are now, where they are large enough for one split GEMM.

        For a few batch rows float32's own GEMM takes twice the time of reading the weights.
        """
        if splits(self.weight):
            self.layer = Float32Linear(GemmWeights("adaLN_modulation", self.weight, self.bias))
            self.weight = self.weight.new_empty(0, self.weight.shape[1])

    def parameters(self) -> Iterator[Tensor]:
        """Return all tensors that depend on the weights."""
        yield from (*self.time_mlp, self.labels, self.bias, self.weight)
        if self.layer is not None:
            yield from self.layer.parameters()
        for layer in self.gemms:
            yield from layer.parameters()

    def __call__(self, t: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute the vectors of timesteps t (E,) and labels y (E,) → (E, V, D).

        out: the tensor to write. TF32 is off.
        """
        if out is None:
            out = self.bias.new_empty(len(t), self.vectors, self.width)
        with true_float32():
            condition = F.silu(self.embed(t, y))  # (E, C)
            self._project(condition, out.flatten(1)[:, : len(self.bias)])
        return out

    def embed(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the sum of the embeddings of timesteps t (E,) and labels y (E,), (E, C)."""
        return self.embed_time(t) + self.labels[y]

    def embed_time(self, t: Tensor) -> Tensor:
        """Return the embedding of timesteps t (E,), (E, C)."""
        w0, b0, w2, b2 = self.time_mlp
        sinusoid = self.sinusoid(t, w0.shape[1]).to(self.bias.dtype)  # (E, 256)
        hidden = F.silu(F.linear(sinusoid, w0, b0))
        return F.linear(hidden, w2, b2)

    def _project(self, condition: Tensor, out: Tensor) -> None:
        """Write the vectors (E, V·D) of condition (E, C)."""
        if self.layer is not None:
            out.copy_(self.layer(condition))
            return
        rows = len(self.bias)
        # Weights in another dtype are converted in turn: all of them at once would take the
        # memory that was saved.
        at_once = rows if self.weight.dtype == self.bias.dtype else BLOCK_VECTORS * self.width
        for first in range(0, rows, at_once):
            some = slice(first, first + at_once)
            weight = self.weight[some].to(self.bias.dtype)
            torch.addmm(self.bias[some], condition, weight.t(), out=out[:, some])

    def fold(self, vector: int, gain: Tensor) -> None:
        """Let scale `vector` multiply by gain (D,) too, so that a norm's weight costs nothing.

        gain·(1 + scale) − 1 takes scale's place.
        """
        rows = slice(vector * self.width, (vector + 1) * self.width)
        self.weight[rows] *= gain[:, None]
        self.bias[rows] = gain * (1 + self.bias[rows]) - 1


class ConditioningTable(RunState):
    """The modulation vectors of a run, at fixed addresses.

    Captured graphs outlive a change of times and labels. `begin(times, labels)` starts a run,
    `advance(i)` puts the run's i-th evaluation into the table, and `condition(index, y)` is two
    look-ups on the device. A pair outside the table finds a row of NaN, so that a wrong order of
    calls never makes a picture.
    """

    def __init__(self, conditioning: Conditioning, table_bytes: int = TABLE_BYTES, least: int = 1):
        """Allocate the table. least: minimum number of entries, even above `table_bytes`."""
        self.conditioning = conditioning
        bias = conditioning.bias
        entry_bytes = conditioning.vectors * conditioning.width * bias.element_size()
        self.usual = max(1, table_bytes // entry_bytes)  # entries
        self.capacity = max(self.usual, least)
        entries = self.capacity + 1
        with torch.inference_mode(False):  # later callers may be in another mode
            self.table = bias.new_empty(entries, conditioning.vectors, conditioning.width)
            self.table[-1] = torch.nan
            # Two offsets add up to an entry. Pairs outside the table have the offset `capacity`,
            # the row of NaN.
            labels = len(conditioning.labels)
            self.offset = torch.full((MAX_EVALUATIONS,), self.capacity, device=bias.device)
            self.label_offset = torch.full((labels,), self.capacity, device=bias.device)

    def begin(self, times: list[float], labels: list[int], at_once: int = 1) -> None:
        """Start a run; arguments as for Network.prepare."""
        device = self.table.device
        # Uploaded once: the loop never waits for the host.
        self.times = torch.tensor(list(times), device=device)
        self.labels = torch.tensor(sorted(set(labels)), device=device)
        self.label_offset.fill_(self.capacity)
        self.label_offset[self.labels] = torch.arange(len(self.labels), device=device)
        # By the usual size, not a larger batch's: GEMMs round by the size of a chunk, and a
        # restarted job must give the same bits.
        self.chunk = max(self.usual // len(self.labels), at_once)
        self.ready = range(0)
        self.advance(0)

    def advance(self, index: int, *more: int) -> None:
        """Fill the table from evaluation `index` on, if that or one of `more` is not in it."""
        if all(i in self.ready for i in (index, *more)):
            return
        self.ready = range(index, min(index + self.chunk, len(self.times)))
        times = self.times[index : self.ready.stop]  # (S,)
        labels = len(self.labels)
        t = times[:, None].expand(-1, labels).flatten()  # (E,)
        self.conditioning(t, self.labels.repeat(len(times)), out=self.table[: len(t)])
        self.offset.fill_(self.capacity)
        offsets = torch.arange(len(times), device=t.device) * labels
        self.offset[index : self.ready.stop] = offsets

    def condition(self, index: Tensor, y: Tensor) -> Modulation:
        """Return where each batch row finds its vectors.

        index (N,): of the run's evaluations; y (N,): labels.
        """
        entry = self.offset[index] + self.label_offset[y]
        return Modulation(self.table, entry.clamp(max=self.capacity))
