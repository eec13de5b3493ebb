"""Conditioning, computed before the denoising loop.

Shifts, scales and gates depend only on (timestep, label) (DiT, arXiv:2212.09748, section 3.2), and
a third of XL/2's weights only compute them. A sampling run knows its timesteps and labels in
advance. So a few large float32 GEMMs compute the vectors for many steps, and the loop looks them up
by an index on the device. Vectors of the null label are computed once per step, not once per
picture.
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

BLOCK_VECTORS = 6  # per block: shift, scale, gate of attention, then of the MLP
MAX_EVALUATIONS = 4096  # per run; at most 1000 steps have two evaluations each
TABLE_BYTES = 256 << 20  # on XL/2: 38 steps for eight labels and the null label


class Conditioning:
    """Maps (t, y) to the modulation vectors of all blocks and of the final layer.

    Vectors 6i … 6i + 5 are shift, scale and gate of block i's attention, then of its MLP; the last
    two are the final layer's shift and scale. layers: names of the adaLN projections, in this
    order. sinusoid(t, width): the sinusoidal embedding of t. dtype: storage dtype of the
    projections' weights, by default the stream's. gemms: layers of a modulation per token, applied
    to all tokens.
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
        # Copied layer by layer, because torch.cat would need the 0.9 GB of XL/2 twice.
        self.weight = self.bias.new_empty(len(self.bias), self.labels.shape[1], dtype=dtype)
        for rows, weight in zip(self.weight.split([*map(len, weights)]), weights):
            rows.copy_(weight)
        self.layer: Float32Linear | None = None

    def split_large_layers(self) -> None:
        """Convert the projections to a split GEMM if they are large enough.

        With few batch rows a float32 GEMM takes twice as long as reading the weights. `fold` must
        not be called later.
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
        """Compute the vectors for timesteps t (E,) and labels y (E,) → (E, V, D), without TF32.

        out: written instead of a new tensor.
        """
        if out is None:
            out = self.bias.new_empty(len(t), self.vectors, self.width)
        with true_float32():
            condition = F.silu(self.embed(t, y))  # (E, C)
            self._project(condition, out.flatten(1)[:, : len(self.bias)])
        return out

    def embed(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the sum (E, C) of the embeddings of timesteps t (E,) and labels y (E,)."""
        return self.embed_time(t) + self.labels[y]

    def embed_time(self, t: Tensor) -> Tensor:
        """Return the embedding (E, C) of timesteps t (E,)."""
        w0, b0, w2, b2 = self.time_mlp
        sinusoid = self.sinusoid(t, w0.shape[1]).to(self.bias.dtype)  # (E, 256)
        hidden = F.silu(F.linear(sinusoid, w0, b0))
        return F.linear(hidden, w2, b2)

    def _project(self, condition: Tensor, out: Tensor) -> None:
        """Write the vectors (E, V·D) for condition (E, C) to `out`."""
        if self.layer is not None:
            out.copy_(self.layer(condition))
            return
        rows = len(self.bias)
        # Convert weights of another dtype in chunks, so that the conversion needs little memory.
        chunk = rows if self.weight.dtype == self.bias.dtype else BLOCK_VECTORS * self.width
        for first in range(0, rows, chunk):
            part = slice(first, first + chunk)
            weight = self.weight[part].to(self.bias.dtype)
            torch.addmm(self.bias[part], condition, weight.t(), out=out[:, part])

    def fold(self, vector: int, gain: Tensor) -> None:
        """Fold the weight of a norm, gain (D,), into scale `vector`.

        scale ← gain·(1 + scale) − 1
        """
        rows = slice(vector * self.width, (vector + 1) * self.width)
        self.weight[rows] *= gain[:, None]
        self.bias[rows] = gain * (1 + self.bias[rows]) - 1


class ConditioningTable(RunState):
    """The modulation vectors of a sampling run, at fixed addresses.

    So captured graphs stay valid when times and labels change. `begin(times, labels)` starts a run,
    `advance(i)` makes sure that the i-th evaluation is in the table, and `condition(index, y)`
    looks up entries on the device. A pair outside the table maps to an entry of NaN, so that a
    missing `advance` cannot give a wrong picture.
    """

    def __init__(
        self, conditioning: Conditioning, table_bytes: int = TABLE_BYTES, min_entries: int = 1
    ):
        """Allocate the table. min_entries: minimum number of entries, even above `table_bytes`."""
        self.conditioning = conditioning
        bias = conditioning.bias
        entry_bytes = conditioning.vectors * conditioning.width * bias.element_size()
        self.default_capacity = max(1, table_bytes // entry_bytes)  # number of entries
        self.capacity = max(self.default_capacity, min_entries)
        entries = self.capacity + 1
        with torch.inference_mode(False):  # callers may or may not be in inference mode
            self.table = bias.new_empty(entries, conditioning.vectors, conditioning.width)
            self.table[-1] = torch.nan
            # Entry = offset + label_offset. Pairs outside the table get the offset `capacity`, the
            # entry of NaN.
            labels = len(conditioning.labels)
            self.offset = torch.full((MAX_EVALUATIONS,), self.capacity, device=bias.device)
            self.label_offset = torch.full((labels,), self.capacity, device=bias.device)

    def begin(self, times: list[float], labels: list[int], at_once: int = 1) -> None:
        """Start a run. The arguments are those of Network.prepare."""
        device = self.table.device
        # Uploaded once, so that the loop does not wait for the host.
        self.times = torch.tensor(list(times), device=device)
        self.labels = torch.tensor(sorted(set(labels)), device=device)
        self.label_offset.fill_(self.capacity)
        self.label_offset[self.labels] = torch.arange(len(self.labels), device=device)
        # The rounding of GEMMs depends on the size of a chunk, and a resumed job must give the same
        # bits. So the size does not depend on `capacity`, which may have grown for a large batch.
        self.chunk = max(self.default_capacity // len(self.labels), at_once)
        self.ready = range(0)
        self.advance(0)

    def advance(self, index: int, *more: int) -> None:
        """Fill the table from evaluation `index` on, unless it contains `index` and `more`."""
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
        """Return the table entry of each batch row.

        index (N,): indices of evaluations. y (N,): labels.
        """
        entry = self.offset[index] + self.label_offset[y]
        return Modulation(self.table, entry.clamp(max=self.capacity))
