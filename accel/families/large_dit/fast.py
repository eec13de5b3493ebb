"""Pack Large-DiT's weights for the accelerated network. Per block:

h ← adaLN(x)                           RMSNorm, its weight folded into the scale's projection
a ← wo(attention(rotated(qkv(h))))     one GEMM for q, k, v; one kernel for norms and rotation
m ← w2(silu(w1·h) ∗ w3·h)              one GEMM for w1, w3; SwiGLU in its epilogue on Hopper
"""

import torch
from torch import Tensor

from accel.families.large_dit.network import DiT_Llama, rotation_table
from accel.fast.conditioning import Conditioning
from accel.fast.network import Packing
from accel.fast.ops import Block, BlockGemms, DirectOps, GemmWeights, Rotation, SplitOps
from accel.fast.reader import Reader
from accel.runtime.stages import Stage


def pack(read: Reader, model: DiT_Llama, ops: DirectOps | SplitOps) -> Packing:
    """Pack a Large-DiT's state dict.

    model: for heads, channels, patch and input size. The conditioning's weights are at least a
    tenth of the network, so they stay in the GEMMs' dtype. Their arithmetic is float32.
    """
    patches = read("x_embedder.weight")  # (D, C·p·p)
    width = len(patches)
    tokens = (model.input_size // model.patch_size) ** 2
    rotation = rotation_table(width // model.n_heads, tokens, ops.stream, ops.device)
    names = read.blocks("attention.wq.weight")
    return Packing(
        patch_size=model.patch_size,
        in_channels=model.in_channels,
        patches=patches,
        position=read("x_embedder.bias").expand(tokens, -1).contiguous(),  # (T, D)
        stages=[
            Stage(
                blocks=[_block(read, name, model.n_heads, rotation, ops) for name in names],
                width=width,
                num_heads=model.n_heads,
            )
        ],
        last_weight=read("final_layer.linear.weight"),
        last_bias=read("final_layer.linear.bias"),
        conditioning=_conditioning(read, names, model, ops),
        rms_eps=model.norm_eps,
    )


def _conditioning(
    read: Reader, names: list[str], model: DiT_Llama, ops: DirectOps | SplitOps
) -> Conditioning:
    """Return the conditioning, with the norms' weights folded into the scales."""
    projections = [f"{name}.adaLN_modulation.1" for name in (*names, "final_layer")]
    sinusoid = model.t_embedder.timestep_embedding
    conditioning = Conditioning(read, projections, sinusoid, ops.dtype)
    norms = [f"{name}.{norm}" for name in names for norm in ("attention_norm", "ffn_norm")]
    fold_norms(read, norms, conditioning)
    return conditioning


def fold_norms(read: Reader, norms: list[str], conditioning: Conditioning) -> None:
    """Fold the weights of all norms up to some layer, in order, into the scales."""
    for index, norm in enumerate(norms):
        # Each norm has three vectors; the scale is the second.
        conditioning.fold(3 * index + 1, read(f"{norm}.weight"))


def _block(
    read: Reader, name: str, heads: int, rotation: Tensor, ops: DirectOps | SplitOps
) -> Block:
    """Pack the block `name`. rotation: the table (T, d/2, 2)."""
    attention = f"{name}.attention"
    mlp = f"{name}.feed_forward"
    head_dim = 2 * rotation.shape[1]
    qkv = [
        _per_query_head(read(f"{attention}.{layer}.weight", ops.dtype), heads, head_dim)
        for layer in ("wq", "wk", "wv")
    ]
    w1 = read(f"{mlp}.w1.weight", ops.dtype)
    w3 = read(f"{mlp}.w3.weight", ops.dtype)
    wo = read(f"{attention}.wo.weight", ops.dtype)
    w2 = read(f"{mlp}.w2.weight", ops.dtype)
    gemms = BlockGemms(
        qkv=GemmWeights(f"{attention}.wq, wk, wv", torch.cat(qkv)),  # (3·D, D)
        proj=GemmWeights(f"{attention}.wo", wo),
        fc1=GemmWeights(f"{mlp}.w1, w3", torch.cat([w1, w3])),  # (2·F, D)
        fc2=GemmWeights(f"{mlp}.w2", w2),
    )
    norms = _norms(read, attention, heads, head_dim)
    return ops.block(gemms, gated=True, rotation=Rotation(rotation, norms))


def _per_query_head(rows, heads, head_dim):
    """Return rows (H·d, …) of the query heads: heads of keys or values that several query heads
    share are repeated.
    """
    by_head = rows.unflatten(0, (-1, head_dim))  # (kv heads, d, …)
    return by_head.repeat_interleave(heads // len(by_head), dim=0).flatten(0, 1)


def _norms(read, attention, heads, head_dim):
    """Return weight and bias of the norms of queries and keys, (2, 2, D); None without qk-norm."""
    if f"{attention}.q_norm.weight" not in read:
        return None

    def norm(name):
        parameters = [read(f"{attention}.{name}.weight"), read(f"{attention}.{name}.bias")]
        return torch.stack([_per_query_head(each, heads, head_dim) for each in parameters])

    return torch.stack([norm("q_norm"), norm("k_norm")])
