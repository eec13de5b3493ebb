"""The accelerated DiT: the same function as models.DiT, laid out for a GPU.

From a DiT's state dict it builds a flat sequence of products in half precision (float32 accumulation) around a float32 residual stream.
Everything between two products is one kernel; what depends on (timestep, label) alone comes from a table. Per block:

    h ← adaln(x)                                    row kernel, reads x, writes h in half
    a ← proj(attention(qkv(h)))                     two products, one attention
    h ← adaln(x + gate·a)                           row kernel, x stays unwritten: the next one adds a again, which is cheaper
    m ← fc2(gelu(fc1(h)))                           two products, GELU in the epilogue
    x ← x + gate·a + gate·m, h ← adaln(x)           row kernel, which is already the next block's first
"""

import copy
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from accel.conditioning import Conditioning, HoistedConditioning
from accel.graphs import Replayed
from accel.kernels.adaln import Modulation, adaln, adaln_split
from accel.kernels.attention import attention
from accel.kernels.linear import Linear
from accel.kernels.linear.tuner import Tuner
from accel.kernels.patch_embed import patch_embed
from accel.kernels.split_attention import split_attention
from accel.kernels.split_linear import SplitLinear, balance
from accel.precision import FAST, true_float32

LAYERS = "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"  # a block's products; GELU follows the third


@dataclass(frozen=True)
class Optimisations:
    """The switches of the accelerated network, each measured alone by scripts/benchmark.py."""

    hoist: bool = True  # a sampling run computes the conditioning of its steps ahead
    rows: str = "auto"  # backend of accel.kernels.adaln
    attention: str = "auto"  # backend of accel.kernels.attention, or of split_attention
    products: str = "auto"  # backend of accel.kernels.linear, or of split_linear
    ends: str = "auto"  # backend of accel.kernels.patch_embed and, in a sampling run, of ancestral_update
    graph: bool = True  # on a GPU, a step of a sampling run, or a call of what `accelerate` returns, is one CUDA graph


def accelerate(model, precision="fp16", device=None, optimisations=Optimisations()):
    """An accelerated twin of a trained DiT, for sampling: `forward(x, t, y)` and `forward_with_cfg(x, t, y, cfg_scale)` as in models.DiT.

    model: a DiT with the published state-dict keys and `num_heads`, models.DiT or the original class; its weights are copied, on the device that
    they are on unless `device` names another. precision: "fp16" or "bf16", the dtype of the products, "exact" for float32's accuracy on float16
    tensor cores, or "fp32".
    Raises ValueError for an unknown precision or a model that is no DiT.
    """
    dtypes = {**FAST, "fp32": torch.float32}
    if precision not in dtypes:
        raise ValueError(f"precision {precision!r}: choose from {', '.join(dtypes)}")
    state = model.state_dict()
    missing = {"x_embedder.proj.weight", "blocks.0.attn.qkv.weight", "final_layer.linear.weight"} - set(state)
    if missing or not hasattr(model, "num_heads"):
        raise ValueError(f"{type(model).__name__} is no DiT: it has no {', '.join(sorted(missing)) or 'num_heads'}")
    device = torch.device(device) if device is not None else state["pos_embed"].device
    network = FastDiT(state, model.num_heads, dtypes[precision], device, optimisations)
    if optimisations.graph and device.type == "cuda":
        network._forward, network._guided = (Replayed(function) for function in (network._forward, network._guided))
    return network


class FastDiT:
    """See the module's text. state: a DiT's state dict, on any device; dtype: that of the products. With float32 or float64 everything is in
    that dtype; with "terms" products take and give float32 as pairs of float16 terms (accel.kernels.split_linear)."""

    def __init__(self, state, num_heads, dtype, device, optimisations=Optimisations(), tuner=None):
        self.num_heads, self.dtype, self.device, self.optimisations = num_heads, dtype, device, optimisations
        self.wide = (
            torch.float32 if dtype == "terms" or dtype.itemsize == 2 else dtype
        )  # residual stream, norms, conditioning, final layer
        self.depth = sum(name.endswith(".attn.qkv.weight") for name in state)

        def take(name, dtype=self.wide):
            # First to the device, which converts faster; always a copy, so that the model may go on being trained.
            return state[name].detach().to(device).to(dtype, copy=True, memory_format=torch.contiguous_format)

        kernel = take("x_embedder.proj.weight")  # (D, C, p, p)
        self.width, self.patch_size = len(kernel), kernel.shape[-1]
        self.patches = kernel.flatten(1)
        self.position = take("pos_embed")[0] + take("x_embedder.proj.bias")  # (T, D)
        self.layers = [[f"blocks.{i}.{layer}" for layer in LAYERS] for i in range(self.depth)]
        self.tuner = tuner or Tuner()
        # Of qkv and fc1: whether float16 was too small.
        self.overflow = torch.zeros(self.depth, 2, 1, dtype=torch.int32, device=device)
        if dtype == "terms":
            self.blocks = [
                self._split_block(names, take, overflow) for names, overflow in zip(self.layers, self.overflow)
            ]
        else:
            self.blocks = [
                [
                    Linear(
                        take(f"{name}.weight", dtype),
                        take(f"{name}.bias", dtype),
                        name.endswith("fc1"),
                        self.tuner,
                        optimisations.products,
                    )
                    for name in names
                ]
                for names in self.layers
            ]
        self.final = take("final_layer.linear.weight"), take("final_layer.linear.bias")
        self.out_channels = len(self.final[1]) // self.patch_size**2
        self.conditioning = Conditioning(state, self.depth, device, self.wide)
        self.alone = self.attend = (
            split_attention if dtype == "terms" else attention
        )  # `attend` is another where tokens lie on several GPUs
        self.table = self.hoisted = None
        self.captured = {}  # steps of sampling runs, by what they depend on

    def shallow(self, depth):
        """A twin with the first `depth` blocks, for measurements; it shares the weights."""
        twin = copy.copy(self)
        twin.blocks, twin.depth, twin.captured = self.blocks[:depth], depth, {}
        return twin

    def product_shapes(self, m):
        """(M, N, K, GELU) of a block's products on M tokens."""
        return [layer.shape(m) for layer in self.blocks[0]]

    def parameters(self):
        """Every weight, as a module's parameters() gives them."""
        yield from (self.patches, self.position, *self.final)
        yield from (tensor for block in self.blocks for layer in block for tensor in layer.parameters())
        yield from self.conditioning.parameters()

    def _split_block(self, names, take, overflow):
        """A block's four products with split weights. Powers of two move between neighbouring products, which changes no bit of the function but
        brings what float16 terms have to hold to a like size: from q to k, from v to proj, from GELU's output to fc2."""
        (qkv, bq), (proj, bp), (fc1, b1), (fc2, b2) = ((take(f"{name}.weight"), take(f"{name}.bias")) for name in names)
        q, k, v = balance(qkv, bq).chunk(3)
        even = torch.exp2(torch.log2(q / k).div(2).round())
        factor = torch.cat([even, 1 / even, v])  # (3·D,)
        after = balance(fc1, b1)
        wide = dict(backend=self.optimisations.products)
        pair = dict(**wide, result="high_low")
        return [
            SplitLinear(qkv * factor[:, None], bq * factor, name=names[0], overflow=overflow[0], **pair),
            SplitLinear(proj / v, bp, name=names[1], **wide),
            SplitLinear(fc1, b1, after=after, gelu=True, name=names[2], overflow=overflow[1], **pair),
            SplitLinear(fc2 / after, b2, name=names[3], **wide),
        ]

    def overflowed(self):
        """The first layer whose results were beyond what float16 terms hold, in any call so far, or None. Waits for the device."""
        met = self.overflow.flatten().nonzero() if self.dtype == "terms" else ()
        return self.layers[int(met[0]) // 2][(0, 2)[int(met[0]) % 2]] if len(met) else None

    @torch.no_grad()
    def forward(self, x, t, y):
        """As models.DiT.forward: x (N, C, H, W), t (N,), y (N,) → (N, C', H, W) in x's dtype."""
        return self._forward(x, t, y)

    __call__ = forward

    @torch.no_grad()
    def forward_with_cfg(self, x, t, y, cfg_scale):
        """As models.DiT.forward_with_cfg: x (2N, C, H, W), of which the first N rows are read; t, y (2N,) → (2N, C', H, W)."""
        return self._guided(x, t, y, cfg_scale)

    def _forward(self, x, t, y):
        return self.unpatchify(self.last_tokens(x, t, y)).to(x.dtype)

    def _guided(self, x, t, y, cfg_scale):
        out = self.unpatchify(self.last_tokens(x[: len(x) // 2], t, y))
        eps, rest = out[:, :3], out[:, 3:]
        cond, uncond = eps.chunk(2)
        guided = uncond + cfg_scale * (cond - uncond)
        return torch.cat([torch.cat([guided, guided]), rest], dim=1).to(x.dtype)

    def last_tokens(self, x, t, y):
        """x (n, C, H, W); t, y (N,), N a multiple of n: the batch several times over → the last layer's tokens (N, T, p·p·C') in the wide dtype."""
        return self.tower(self.embed(x, copies=len(y) // len(x)), self.modulation(t, y, self.hoisted))

    def embed(self, x, part=slice(None), copies=1):
        """Latents (N, C, H, W) → the tokens `part` of each (copies·N, T', D), the batch `copies` times over."""
        with true_float32():
            return patch_embed(
                x.to(self.wide).contiguous(),
                self.patches,
                self.position[part],
                part.start or 0,
                copies,
                self.optimisations.ends,
            )

    def modulation(self, t, y, hoisted=None):
        """Where rows with timesteps t (N,) and labels y (N,) find their vectors: in a run's table, or computed here."""
        if hoisted:
            return hoisted.modulation(t, y)
        return Modulation(self.conditioning(t, y), torch.arange(len(t), device=t.device))

    def unpatchify(self, x):
        """(N, T, p·p·C') → (N, C', H, W)."""
        side, p = round(x.shape[1] ** 0.5), self.patch_size
        x = x.unflatten(-1, (p, p, self.out_channels)).unflatten(1, (side, side))  # (N, side, side, p, p, C')
        return x.permute(0, 5, 1, 3, 2, 4).reshape(len(x), self.out_channels, side * p, side * p)

    def tower(self, x, modulation, blocks=None):
        """All blocks and the final layer: x (N, T, D), overwritten → (N, T, p·p·C'). Or the range `blocks` of them; those that are not the last
        give x."""

        def norm(shift, *branches, last=False):
            how = x, modulation, shift, shift + 1, branches, len(branches) == 2
            if self.dtype == "terms" and not last:
                return adaln_split(*how, switch.rows)
            return adaln(*how, self.wide if last else self.dtype, switch.rows)

        switch = self.optimisations
        blocks = blocks or range(self.depth)
        h = norm(6 * blocks[0])  # (N, T, D)
        for i in blocks:
            qkv, proj, fc1, fc2 = self.blocks[i]
            gate_msa, shift_mlp, gate_mlp, following = (6 * i + vector for vector in (2, 3, 5, 6))
            a = proj(self.attend(qkv(h), self.num_heads, switch.attention))
            h = norm(shift_mlp, (a, gate_msa))
            m = fc2(fc1(h))
            h = norm(following, (a, gate_msa), (m, gate_mlp), last=i + 1 == self.depth)
        if blocks[-1] + 1 < self.depth:
            return x
        with true_float32():
            return F.linear(h, *self.final)


@contextmanager
def hoist_conditioning(network, timesteps, labels, together=1):
    """Compute a run's conditioning ahead of its loop. timesteps: the original timesteps in the order they come (ints); labels: all that the run
    meets, the null label included (ints); together: how many timesteps may be met between two steps. Yields the table: call its `reach(i)` before
    step i. Inside, `network` (a FastDiT) knows these pairs only.
    """
    least = len(set(labels)) * together
    if network.table is None or network.table.capacity < least:
        network.table = None  # first its memory
        for replayed in network.captured.values():  # steps that look things up in it
            replayed.captured.clear()
        network.table = HoistedConditioning(network.conditioning, least=least)
    network.table.begin(timesteps, labels, together)
    network.hoisted = network.table
    try:
        yield network.table
    finally:
        network.hoisted = None


class CompiledDiT:
    """A models.DiT in `dtype` under torch.compile, for whoever prefers the compiler, and for comparison."""

    def __init__(self, model, dtype, mode="max-autotune"):
        self.model, self.dtype = model.to(dtype), dtype
        self._forward = torch.compile(model.forward, mode=mode, dynamic=False)
        self._guided = torch.compile(model.forward_with_cfg, mode=mode, dynamic=False)

    def parameters(self):
        return self.model.parameters()

    def forward(self, x, t, y):
        return self._forward(x.to(self.dtype), t, y).to(
            x.dtype, copy=True
        )  # the compiler's graph will overwrite its output

    def forward_with_cfg(self, x, t, y, cfg_scale):
        return self._guided(x.to(self.dtype), t, y, cfg_scale).to(x.dtype, copy=True)
