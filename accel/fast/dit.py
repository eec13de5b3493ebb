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
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from accel.fast.conditioning import Conditioning, ConditioningTable
from accel.kernels.adaln import Modulation, adaln, adaln_split
from accel.kernels.attention import attention
from accel.kernels.linear import Linear, Tuner
from accel.kernels.patch_embed import patch_embed
from accel.kernels.split_attention import split_attention
from accel.kernels.split_linear import HighLow, SplitLinear, balance
from accel.network import BlockNetwork
from accel.precision import TIERS, true_float32

LAYERS = "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"  # the GEMMs of a block; GELU follows the third


def build(
    state: dict[str, torch.Tensor],
    model: torch.nn.Module,
    tier: str,
    device: torch.device,
    tuner: Tuner | None = None,
    gemm: str = "auto",
) -> "FastDiT":
    """The accelerated network of a tier. model: the module, for its heads and the embedding that it gives a timestep.
    Raises ValueError, naming the layer, for weights that the tier cannot hold."""
    if tier == "exact":
        network = ExactDiT(state, model.num_heads, device, gemm)
    else:
        network = FastDiT(state, model.num_heads, TIERS[tier].dtype, device, tuner, gemm)
    network.conditioning.sinusoid = model.t_embedder.timestep_embedding
    return network


class FastDiT(BlockNetwork):
    """See the module's text.

    state: a DiT's state dict, on any device. dtype: of the GEMMs; residual stream, norms, conditioning and final layer
    are float32, or float64 with float64. tuner: chooses the GEMMs' algorithms. gemm: their backend.

    The ops of a step, and whether it is captured, hoists its conditioning and fuses its update, are attributes: what
    measures one of them replaces it.
    """

    captures = hoists = True
    adaln, attention, patch_embed = staticmethod(adaln), staticmethod(attention), staticmethod(patch_embed)
    norms, average = (), None  # of queries and keys, over all heads; their sum over ranks that divide the heads

    def __init__(
        self,
        state: dict[str, torch.Tensor],
        num_heads: int,
        dtype: torch.dtype,
        device: torch.device,
        tuner: Tuner | None = None,
        gemm: str = "auto",
    ):
        super().__init__()
        self.num_heads, self.dtype, self.device, self.gemm = num_heads, dtype, device, gemm
        self.stream_dtype = torch.promote_types(dtype, torch.float32)
        self.fuses_update = device.type == "cuda"
        self.tuner = tuner or Tuner()

        def take(name: str, dtype: torch.dtype = self.stream_dtype) -> torch.Tensor:
            # First to the device, which converts faster. Always a copy: the model may go on being trained.
            return state[name].detach().to(device).to(dtype, copy=True, memory_format=torch.contiguous_format)

        self._load(state, take)
        self.table = None  # of sampling runs

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
                backend=self.gemm,
            )
            for layer in LAYERS
        ]

    def adaptive_norm(self, x, modulation, vector, branches=()) -> torch.Tensor:
        """The input of a GEMM: adaLN of x + Σ gate·branch with shift and scale from `vector` on. Two branches end a
        block: then x is updated."""
        return self.adaln(x, modulation, vector, vector + 1, branches, len(branches) == 2, self.dtype)

    def last_norm(self, x, modulation, vector, branches) -> torch.Tensor:
        """The same before the final layer."""
        return self.adaln(x, modulation, vector, vector + 1, branches, True, self.stream_dtype)

    def attend_in_block(self, block: int, qkv: Any, attend: Callable, first: int = 0) -> Any:
        """What `attend` gives in a block. first: the token that qkv begins with."""
        return attend(qkv, self.num_heads)

    # ---- the network ----

    def embed(self, x: torch.Tensor, tokens: slice = slice(None), copies: int = 1) -> torch.Tensor:
        x, first = x.to(self.stream_dtype).contiguous(), tokens.start or 0
        with true_float32():
            return self.patch_embed(x, self.patches, self.position[tokens], first, copies)

    def condition(self, t: torch.Tensor, y: torch.Tensor) -> Modulation:
        return Modulation(self.conditioning(t, y), torch.arange(len(t), device=t.device))

    def forward_blocks(self, h, condition, attend, tokens=slice(None)) -> torch.Tensor:
        x, first = h, tokens.start or 0
        h = self.adaptive_norm(x, condition, 0)  # (N, t, D)
        for i in range(self.depth):
            qkv, proj, fc1, fc2 = self.blocks[i]
            gate_msa, shift_mlp, gate_mlp, following = (6 * i + vector for vector in (2, 3, 5, 6))
            a = proj(self.attend_in_block(i, qkv(h), attend, first))  # (N, t, D)
            h = self.adaptive_norm(x, condition, shift_mlp, ((a, gate_msa),))
            m = fc2(fc1(h))  # (N, t, D)
            branches = (a, gate_msa), (m, gate_mlp)
            if i + 1 < self.depth:
                h = self.adaptive_norm(x, condition, following, branches)
        with true_float32():
            return F.linear(self.last_norm(x, condition, following, branches), *self.final)  # (N, t, p·p·C')

    def schedule(self, times, labels, at_once=1) -> tuple[BlockNetwork, Callable[..., None]]:
        if not self.hoists:
            return super().schedule(times, labels, at_once)
        least = len(set(labels)) * at_once
        if self.table is None or self.table.capacity < least:
            self.table = None  # free its memory first
            self._replayed.clear()  # they look vectors up in it
            self.table = ConditioningTable(self.conditioning, least=least)
        self.table.begin(times, labels, at_once)
        return self.conditioned(self.table.modulation), self.table.advance

    def parameters(self) -> Iterator[torch.Tensor]:
        layers = (layer for block in self.blocks for layer in block)
        yield from (self.patches, self.position, *self.final, *self.conditioning.parameters())
        for layer in layers:
            yield from layer.parameters()

    def tune(self, row_tokens: Iterable[int]) -> None:
        tuned = [layer for layer in self.blocks[0] if layer.backend == "tuned"]
        gemms = [(*layer.shape(m), self.dtype, self.device) for m in sorted(set(row_tokens)) for layer in tuned]
        before = len(self.tuner.seconds)
        self.tuner.choose_alike(gemms)
        if taken := self.tuner.seconds[before:]:
            print(f"GEMMs measured for this GPU: {len(taken)} in {sum(taken):.1f} s; later runs find what was chosen")


class ExactDiT(FastDiT):
    """float32's accuracy from float16 tensor cores: GEMMs and attention take and give high/low splits."""

    exchanges = ("ulysses",)  # the others' attention takes half precision
    adaln_split, attention = staticmethod(adaln_split), staticmethod(split_attention)

    def __init__(self, state, num_heads, device, gemm="auto"):
        depth = sum(name.endswith(".attn.qkv.weight") for name in state)
        # Of qkv and fc1 of each block; their kernels set it.
        self.overflow = torch.zeros(depth, 2, 1, dtype=torch.int32, device=device)
        super().__init__(state, num_heads, torch.float32, device, gemm=gemm)

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
        layer = partial(SplitLinear, backend=self.gemm)
        return [
            layer(qkv * factor[:, None], bq * factor, result="high_low", overflow=of_qkv, name=f"{name}.attn.qkv"),
            layer(proj / v, bp, name=f"{name}.attn.proj"),
            layer(fc1, b1, gelu=True, after=after, result="high_low", overflow=of_fc1, name=f"{name}.mlp.fc1"),
            layer(fc2 / after, b2, name=f"{name}.mlp.fc2"),
        ]

    def adaptive_norm(self, x, modulation, vector, branches=()) -> HighLow:
        stack = self.blocks[0][0].backend == "cublas"
        return self.adaln_split(x, modulation, vector, vector + 1, branches, len(branches) == 2, stack=stack)

    def overflowed(self) -> str | None:
        layers = self.overflow.flatten().nonzero().flatten().tolist()  # waits for the device
        return f"blocks.{layers[0] // 2}.{LAYERS[(0, 2)[layers[0] % 2]]}" if layers else None
