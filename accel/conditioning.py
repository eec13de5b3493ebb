"""Conditioning taken out of the denoising loop.

Every shift, scale and gate of a DiT is a function of (timestep, label) alone (arXiv:2212.09748, section 3.2): a third of XL/2's weights work
on nothing else. All timesteps of a run and all its labels are known ahead, so their vectors are computed in a few large float32
products, a chunk of steps at a time, and the loop looks them up by an index on the device. The null label is computed once, not
once a picture.
"""

import torch
import torch.nn.functional as F

from accel.kernels.adaln import Modulation
from accel.precision import true_float32
from models import TimestepEmbedder

TABLE_BYTES = 256 << 20  # a chunk of 37 steps for eight labels and the null label on XL/2


class Conditioning:
    """(t, y) → the modulation vectors of all blocks and of the final layer, from a DiT's state dict.

    Vector 6i + j is block i's j-th of shift, scale, gate of attention, then of the MLP; the last two are the final layer's shift and scale.
    """

    def __init__(self, state, depth, device, dtype=torch.float32):
        def take(name):
            return state[name].detach().to(device).to(dtype, copy=True)

        layers = [f"blocks.{i}.adaLN_modulation.1" for i in range(depth)] + ["final_layer.adaLN_modulation.1"]
        self.sinusoid, self.width = state["t_embedder.mlp.0.weight"].shape[1], state["t_embedder.mlp.2.weight"].shape[0]
        self.time = [take(f"t_embedder.mlp.{i}.{kind}") for i in (0, 2) for kind in ("weight", "bias")]
        self.labels = take("y_embedder.embedding_table.weight")
        # Filled row by row: concatenating would hold the 0.9 GB twice.
        self.weight = torch.empty(
            sum(len(state[f"{layer}.weight"]) for layer in layers), self.width, device=device, dtype=dtype
        )
        row = 0
        for layer in layers:
            rows = len(state[f"{layer}.weight"])
            self.weight[row : row + rows] = state[f"{layer}.weight"].detach()
            row += rows
        self.bias = torch.cat([take(f"{layer}.bias") for layer in layers])
        self.vectors = len(self.bias) // self.width

    def parameters(self):
        return iter((*self.time, self.labels, self.weight, self.bias))

    def __call__(self, t, y, out=None):
        """t (E,) timesteps, y (E,) labels → (E, V, D), into `out` if given. Float32 stays float32: no TF32 here."""
        sinusoid = TimestepEmbedder.timestep_embedding(t, self.sinusoid).to(self.bias.dtype)  # (E, 256)
        w0, b0, w2, b2 = self.time
        if out is None:
            out = torch.empty(len(t), self.vectors, self.width, device=t.device, dtype=self.bias.dtype)
        with true_float32():
            condition = F.linear(F.silu(F.linear(sinusoid, w0, b0)), w2, b2) + self.labels[y]  # (E, D)
            torch.addmm(self.bias, F.silu(condition), self.weight.t(), out=out.flatten(1))
        return out


class HoistedConditioning:
    """The modulation table of a run, at fixed addresses so that captured graphs outlive a change of chunk, labels or timesteps.

    `begin(timesteps, labels)` starts a run, `reach(i)` makes sure that the run's i-th timestep is in the table, `modulation(t, y)` is
    all the loop does: two look-ups on the device. A pair that is not in the table meets a row of NaN, so a wrong order of calls cannot
    pass for a picture.
    """

    def __init__(self, conditioning, table_bytes=TABLE_BYTES, original_steps=1000, least=1):
        """least: entries that there have to be, whatever their bytes."""
        c = conditioning
        self.conditioning, self.device = c, c.bias.device
        self.usual = max(1, table_bytes // (c.bias.numel() * c.bias.element_size()))
        self.capacity = max(self.usual, least)
        with torch.inference_mode(False):  # these outlive the mode of whoever comes first
            self.table = torch.empty(self.capacity + 1, c.vectors, c.width, dtype=c.bias.dtype, device=self.device)
            self.table[-1] = torch.nan
            # Offsets that add up to an entry; `capacity`, the row of NaN, for what is not there. The last place is for t out of range.
            self.step_offset = torch.full((original_steps + 1,), self.capacity, device=self.device)
            self.label_offset = torch.full((len(c.labels),), self.capacity, device=self.device)

    def begin(self, timesteps, labels, together=1):
        """timesteps: a run's original timesteps in order (ints); labels: those it meets, the null label included (ints); together: how many timesteps
        may be met between two calls of `reach`."""
        if max(timesteps) >= len(self.step_offset) - 1:
            raise ValueError(
                f"timestep {max(timesteps)}: the table is for processes of {len(self.step_offset) - 1} steps"
            )
        self.timesteps = torch.tensor(
            list(timesteps), device=self.device
        )  # copied here once: the loop itself never waits for the host
        self.run_labels = torch.tensor(sorted(set(labels)), device=self.device)
        if len(self.run_labels) * together > self.capacity:
            raise ValueError(
                f"{len(self.run_labels)} labels need a table of {len(self.run_labels) * together} entries, there are {self.capacity}; "
                "sample fewer at a time"
            )
        self.label_offset.fill_(self.capacity)
        self.label_offset[self.run_labels] = torch.arange(len(self.run_labels), device=self.device)
        # By the usual size, not by what a larger batch before this one asked for: a chunk's products round by its size, and a job that is started
        # again is to give the same bits.
        self.chunk = max(self.usual // len(self.run_labels), together)
        self.ready = range(0)
        self.reach(0)

    def reach(self, index, *more):
        """Fill the table from the run's `index`-th timestep on, if that or one of `more` that are met before the next call is not in it."""
        if all(one in self.ready for one in (index, *more)):
            return
        self.ready, labels = range(index, min(index + self.chunk, len(self.timesteps))), self.run_labels
        steps = self.timesteps[index : self.ready.stop]
        if not all(one in self.ready for one in more):  # they lie too far apart
            self.ready = sorted({index, *more})
            if len(self.ready) > self.chunk:
                raise ValueError(
                    f"{len(self.ready)} timesteps of {len(labels)} labels at once, the table has {self.capacity} entries; sample fewer at a time"
                )
            steps = torch.stack([self.timesteps[one] for one in self.ready])
        self.conditioning(
            steps[:, None].expand(-1, len(labels)).flatten(),
            labels.repeat(len(steps)),
            out=self.table[: len(steps) * len(labels)],
        )
        self.step_offset.fill_(self.capacity)
        self.step_offset[steps] = torch.arange(len(steps), device=self.device) * len(labels)

    def modulation(self, t, y):
        """t (N,) original timesteps, y (N,) labels → where each sample finds its vectors."""
        step = self.step_offset[t.long().clamp(-1, len(self.step_offset) - 1)]
        return Modulation(self.table, (step + self.label_offset[y]).clamp(max=self.capacity))
