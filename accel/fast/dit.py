"""The accelerated DiT: the function of models.DiT, laid out for a GPU.

Half-precision GEMMs (float32 accumulation) around a float32 residual stream. One kernel does everything between two
GEMMs. What depends on (timestep, label) alone comes from a table. Per block:

    h ← adaLN(x)                               fused adaLN kernel: reads x, writes h in half precision
    a ← proj(attention(qkv(h)))                two GEMMs, one attention
    h ← adaLN(x + gate·a)                      x is not written: the next kernel adds a again, which is cheaper
    m ← fc2(gelu(fc1(h)))                      two GEMMs, GELU in the epilogue
    x ← x + gate·a + gate·m,  h ← adaLN(x)     this is already the next block's first kernel
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from accel.fast.conditioning import Conditioning, ConditioningTable
from accel.kernels.adaln import Modulation, adaln, adaln_split
from accel.kernels.ancestral_update import ancestral_update
from accel.kernels.attention import attention
from accel.kernels.linear import Linear, Tuner
from accel.kernels.patch_embed import patch_embed
from accel.kernels.split_attention import split_attention
from accel.kernels.split_linear import HighLow, SplitLinear, balance, split
from accel.network import BlockNetwork
from accel.precision import TIERS, true_float32

LAYERS = "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"  # the GEMMs of a block; GELU follows the third


@dataclass(frozen=True)
class Optimisations:
    """The switches of an accelerated network. bench/steps.py measures each alone."""

    hoist: bool = True  # a sampling run computes the conditioning of its steps ahead
    adaln: str = "auto"  # backend of the fused adaLN kernel
    attention: str = "auto"  # backend of the attention
    gemm: str = "auto"  # backend of the GEMMs
    embed_update: str = "auto"  # backend of patch embedding and sampler update
    graph: bool = True  # on a GPU, a step is one CUDA graph


def build(
    state: dict[str, torch.Tensor],
    num_heads: int,
    tier: str,
    device: torch.device,
    optimisations: Optimisations = Optimisations(),  # noqa: B008 (frozen)
    tuner: Tuner | None = None,
) -> "FastDiT":
    """The accelerated network of a tier. Raises ValueError, naming the layer, for weights that the tier cannot hold."""
    if tier == "exact":
        return ExactDiT(state, num_heads, device, optimisations)
    return FastDiT(state, num_heads, TIERS[tier].dtype, device, optimisations, tuner)


def build_like(state: dict[str, torch.Tensor], model: torch.nn.Module, *arguments, **keywords) -> "FastDiT":
    """`build` with the heads of a module, and the embedding that it gives a timestep."""
    network = build(state, model.num_heads, *arguments, **keywords)
    network.conditioning.sinusoid = model.t_embedder.timestep_embedding
    return network


class FastDiT(BlockNetwork):
    """See the module's text.

    state: a DiT's state dict, on any device. dtype: of the GEMMs; residual stream, norms, conditioning and final layer
    are float32, or float64 with float64. tuner: chooses the GEMMs' algorithms.
    """

    def __init__(
        self,
        state: dict[str, torch.Tensor],
        num_heads: int,
        dtype: torch.dtype,
        device: torch.device,
        optimisations: Optimisations = Optimisations(),  # noqa: B008 (frozen)
        tuner: Tuner | None = None,
    ):
        super().__init__()
        self.num_heads, self.dtype, self.device, self.optimisations = num_heads, dtype, device, optimisations
        self.stream_dtype = torch.promote_types(dtype, torch.float32)
        self.captures = optimisations.graph
        self.fuses_update = device.type == "cuda" and optimisations.embed_update != "torch"
        self.tuner = tuner or Tuner()

        def take(name: str, dtype: torch.dtype = self.stream_dtype) -> torch.Tensor:
            # First to the device, which converts faster. Always a copy: the model may go on being trained.
            return state[name].detach().to(device).to(dtype, copy=True, memory_format=torch.contiguous_format)

        self._load(state, take)
        self.table = self.hoisted = None  # the table of sampling runs; the same inside one, else None

    # ---- what the tiers and families do differently ----

    def _load(self, state, take):
        """Weights → what the steps compute with."""
        self.depth = sum(name.endswith(".attn.qkv.weight") for name in state)
        kernel = take("x_embedder.proj.weight")  # (D, C, p, p)
        self.width, self.in_channels, self.patch_size = *kernel.shape[:2], kernel.shape[-1]
        self.patches = kernel.flatten(1)  # (D, C·p·p)
        self.position = take("pos_embed")[0] + take("x_embedder.proj.bias")  # (T, D)
        self.blocks = [self._block(f"blocks.{i}", take) for i in range(self.depth)]
        self.final = take("final_layer.linear.weight"), take("final_layer.linear.bias")
        modulations = [f"blocks.{i}.adaLN_modulation.1" for i in range(self.depth)]
        self.conditioning = Conditioning(state, [*modulations, "final_layer.adaLN_modulation.1"], take)

    def _block(self, name, take):
        """The four GEMMs of block `name`."""
        return [
            Linear(
                take(f"{name}.{layer}.weight", self.dtype),
                take(f"{name}.{layer}.bias", self.dtype),
                gelu=layer == "mlp.fc1",
                tuner=self.tuner,
                backend=self.optimisations.gemm,
            )
            for layer in LAYERS
        ]

    def attention(self, qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
        return attention(qkv, num_heads, self.optimisations.attention)

    def _adaln(self, x, modulation, vector, branches=()):
        """The input of a GEMM: adaLN of x + Σ gate·branch with shift and scale from `vector` on. Two branches end a
        block: then x is updated."""
        return adaln(
            x, modulation, vector, vector + 1, branches, len(branches) == 2, self.dtype, self.optimisations.adaln
        )

    # ---- the network ----

    def embed(self, x: torch.Tensor, tokens: slice = slice(None), copies: int = 1) -> torch.Tensor:
        x, first = x.to(self.stream_dtype).contiguous(), tokens.start or 0
        with true_float32():
            position = self.position[tokens]
            return patch_embed(x, self.patches, position, first, copies, self.optimisations.embed_update)

    def condition(self, t: torch.Tensor, y: torch.Tensor) -> Modulation:
        if self.hoisted is not None:
            return self.hoisted.modulation(t, y)
        return Modulation(self.conditioning(t, y), torch.arange(len(t), device=t.device))

    def forward_blocks(self, h, condition, *, attend=None, tokens=slice(None)) -> torch.Tensor:
        attend, x = attend or self.attention, h
        h = self._adaln(x, condition, 0)  # (N, t, D)
        for i in range(self.depth):
            qkv, proj, fc1, fc2 = self.blocks[i]
            gate_msa, shift_mlp, gate_mlp, following = (6 * i + vector for vector in (2, 3, 5, 6))
            a = proj(attend(qkv(h), self.num_heads))  # (N, t, D)
            h = self._adaln(x, condition, shift_mlp, ((a, gate_msa),))
            m = fc2(fc1(h))  # (N, t, D)
            branches = (a, gate_msa), (m, gate_mlp)
            if i + 1 < self.depth:
                h = self._adaln(x, condition, following, branches)
        with true_float32():
            return F.linear(self._last_adaln(x, condition, following, branches), *self.final)  # (N, t, p·p·C')

    def _last_adaln(self, x, modulation, vector, branches):
        dtype, backend = self.stream_dtype, self.optimisations.adaln
        return adaln(x, modulation, vector, vector + 1, branches, True, dtype, backend)

    @contextmanager
    def sampling_run(self, timesteps: list[int], labels: list[int], at_once: int = 1) -> Iterator[Callable[..., None]]:
        if not self.optimisations.hoist:
            yield lambda *evaluations: None
            return
        least = len(set(labels)) * at_once
        if self.table is None or self.table.capacity < least:
            self.table = None  # free its memory first
            for replayed in self._replayed.values():  # they look vectors up in it
                replayed.graphs.clear()
            self.table = ConditioningTable(self.conditioning, least=least)
        self.table.begin(timesteps, labels, at_once)
        self.hoisted = self.table
        try:
            yield self.table.advance
        finally:
            self.hoisted = None

    def parameters(self) -> Iterator[torch.Tensor]:
        layers = (layer for block in self.blocks for layer in block)
        yield from (self.patches, self.position, *self.final, *self.conditioning.parameters())
        for layer in layers:
            yield from layer.parameters()

    # ---- for measurements and for ranks ----

    def tune(self, row_tokens: Iterable[int], share: Callable[[Callable[[], Any]], Any]) -> None:
        tuned = [layer for layer in self.blocks[0] if layer.backend == "tuned"]
        gemms = [(*layer.shape(m), self.dtype, self.device) for m in sorted(set(row_tokens)) for layer in tuned]
        choices = share(lambda: [self.tuner.plain(*gemm) for gemm in gemms])
        for gemm, choice in zip(gemms, choices, strict=True):
            self.tuner.adopt(*gemm, choice)

    def divide(self, rank: int, ranks: int, all_reduce: Callable[[torch.Tensor], object]) -> None:
        """Keep a rank's part of the blocks' GEMMs, in place: its heads, and its part of the hidden width (Shoeybi et
        al. 2019, arXiv:1909.08053, section 3). all_reduce(x): sums x over the ranks, in place; twice a block."""

        def own(tensor, matrices):  # its part of the rows of each of `matrices` matrices
            return tensor.unflatten(0, (matrices, ranks, -1))[:, rank].flatten(0, 1).clone()

        self.num_heads //= ranks
        for layers in self.blocks:
            for first, second in ((0, 1), (2, 3)):
                inner, outer = layers[first], layers[second]
                matrices = len(inner.weight) // outer.weight.shape[1]  # side by side, such as q, k and v
                inner.weight, inner.bias = own(inner.weight, matrices), own(inner.bias, matrices)
                outer.weight = outer.weight.unflatten(1, (ranks, -1))[:, rank].clone()
                outer.bias = outer.bias if rank == 0 else torch.zeros_like(outer.bias)
                layers[second] = Summed(outer, all_reduce)

    def kernel_calls(self, latents: torch.Tensor, batch_rows: int, guided: bool) -> list[Callable[[], object]]:
        """Every kernel of a sampling step, once, for warming up: an evaluation of `batch_rows` rows on latents
        (n, C, L, L), and an update of a latent."""
        m, one = batch_rows * len(self.position), latents[:1]
        t = torch.zeros(batch_rows, dtype=torch.int64, device=self.device)
        h = self.position.repeat(batch_rows, 1, 1)  # (N, T, D)
        branch, condition = (h.to(self.dtype), 0), self.condition(t, t)
        tokens = h.new_zeros(1 + guided, len(self.position), 2 * self.patches.shape[1])
        scale, coefficients = 1.0 if guided else None, h.new_zeros(1, 6)
        return [
            lambda: self.embed(latents, copies=batch_rows // len(latents)),
            *(partial(self._adaln, h.clone(), condition, 0, (branch,) * count) for count in range(3)),
            lambda: self._last_adaln(h.clone(), condition, 0, (branch, branch)),
            lambda: self.attention(self._qkv_like(h), self.num_heads),
            *(partial(layer.prepare, m) for layer in self.blocks[0]),
            lambda: ancestral_update(tokens, one, one, t[:1], coefficients, scale, self.optimisations.embed_update),
        ]

    def _qkv_like(self, h):
        return h.repeat(1, 1, 3).to(self.dtype)


class Summed:
    """A layer of whose inner dimension every rank has a part."""

    def __init__(self, layer: Linear, all_reduce: Callable[[torch.Tensor], object]):
        self.layer, self.all_reduce = layer, all_reduce

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        self.all_reduce(out)
        return out


class ExactDiT(FastDiT):
    """float32's accuracy from float16 tensor cores: GEMMs and attention take and give high/low splits."""

    exchanges = ("ulysses",)  # the others' attention takes half precision

    def __init__(self, state, num_heads, device, optimisations=Optimisations()):  # noqa: B008 (frozen)
        depth = sum(name.endswith(".attn.qkv.weight") for name in state)
        # Of qkv and fc1 of each block; their kernels set it.
        self.overflow = torch.zeros(depth, 2, 1, dtype=torch.int32, device=device)
        super().__init__(state, num_heads, torch.float32, device, optimisations)

    def _block(self, name, take):
        """Powers of two move between neighbouring GEMMs. They change no bit of the function, but bring what a high/low
        split has to hold to a like size: from q to k, from v to proj, from GELU's output to fc2."""
        weights = [(take(f"{name}.{layer}.weight"), take(f"{name}.{layer}.bias")) for layer in LAYERS]
        (qkv, bq), (proj, bp), (fc1, b1), (fc2, b2) = weights
        q, k, v = balance(qkv, bq).chunk(3)  # each (D,)
        even = torch.exp2(torch.log2(q / k).div(2).round())
        factor = torch.cat([even, 1 / even, v])  # (3·D,)
        after = balance(fc1, b1)
        of_qkv, of_fc1 = self.overflow[int(name.rpartition(".")[2])]
        layer = partial(SplitLinear, backend=self.optimisations.gemm)
        return [
            layer(qkv * factor[:, None], bq * factor, result="high_low", overflow=of_qkv, name=f"{name}.attn.qkv"),
            layer(proj / v, bp, name=f"{name}.attn.proj"),
            layer(fc1, b1, gelu=True, after=after, result="high_low", overflow=of_fc1, name=f"{name}.mlp.fc1"),
            layer(fc2 / after, b2, name=f"{name}.mlp.fc2"),
        ]

    def attention(self, qkv: HighLow, num_heads: int) -> HighLow:
        return split_attention(qkv, num_heads, self.optimisations.attention)

    def _adaln(self, x, modulation, vector, branches=()):
        update, backend = len(branches) == 2, self.optimisations.adaln
        stack = self.blocks[0][0].backend == "cublas"
        return adaln_split(x, modulation, vector, vector + 1, branches, update, backend, stack)

    def _qkv_like(self, h):
        return split(h.repeat(1, 1, 3), per_row=False)

    def tune(self, row_tokens, share) -> None:
        """Nothing to choose: its kernels have one configuration."""

    def overflowed(self) -> str | None:
        layers = self.overflow.flatten().nonzero().flatten().tolist()  # waits for the device
        return f"blocks.{layers[0] // 2}.{LAYERS[(0, 2)[layers[0] % 2]]}" if layers else None
