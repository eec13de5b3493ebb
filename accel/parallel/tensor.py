"""Tensor parallelism: every layer's weights divided over GPUs, for networks that do not fit into one (Shoeybi et al. 2019, arXiv:1909.08053, section 3).

By DTensor: qkv and fc1 column-wise, proj and fc2 row-wise, so that a block sums its partial results twice (all-reduce of N·T·D each); adaLN's
projection, a third of a DiT's weights, column-wise, its few vectors gathered. A rank has heads/s whole heads. It is no way to be fast: for one
picture a layer sends 2·N·T·D·(s−1)/s·2 elements a rank where sharing tokens sends a fraction of that, and nothing where rows are shared.
"""

import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate


def divide_weights(model, mesh):
    """Divide the blocks of `model`, a models.DiT whose weights may lie on the CPU, over the ranks of a one-dimensional mesh, in place; every rank
    holds the same weights before. Only a rank's part comes to its device. Heads and hidden width must divide. Returns model."""
    ranks = mesh.size()
    plan = {
        "attn.qkv": ColwiseParallel(),
        "attn.proj": RowwiseParallel(),
        "mlp.fc1": ColwiseParallel(),
        "mlp.fc2": RowwiseParallel(),
        "adaLN_modulation.1": ColwiseParallel(output_layouts=Replicate()),
    }
    for block in model.blocks:
        attn = block.attn
        attn.num_heads //= ranks
        for name, tensor in (("weight", attn.qkv.weight), ("bias", attn.qkv.bias)):
            # q, k, v, each head-major → a rank's heads of q, k and v side by side: what column-wise cutting then gives it.
            parts = tensor.detach().unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2)
            setattr(attn.qkv, name, torch.nn.Parameter(parts, requires_grad=False))
        parallelize_module(block, mesh, plan, src_data_rank=None)  # None: cut what is here, send nothing
    return model.to(mesh.device_type)
