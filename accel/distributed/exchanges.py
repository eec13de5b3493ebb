"""Attention over tokens that are split across GPUs: keys and values are gathered in each layer.

Each of s ranks has t = T / s tokens and receives 2·N·(T−t)·D elements per layer, by
torch.distributed or by a Triton kernel that writes over NVLink.
"""

import os
from typing import NamedTuple

import torch
import torch.distributed as dist

from accel.kernels.attention import attention_to


class AllGather:
    """Gather keys and values with torch.distributed: for CPUs, and for GPUs without NVLink."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.size = dist.get_world_size(group)

    def __call__(self, qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Compute attention of the local tokens to all tokens: qkv (N, t, 3·D) → (N, t, D)."""
        width = qkv.shape[-1] // 3
        return attention_to(qkv, self.gather(qkv[..., width:]), num_heads)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Gather the local keys and values (N, t, 2·D) → (N, T, 2·D)."""
        local = part.contiguous()
        parts = local.new_empty(self.size, *local.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), local, group=self.group)
        return parts.transpose(0, 1).flatten(1, 2)


class _Buffer(NamedTuple):
    """A double buffer in symmetric memory: a peer may be one layer ahead."""

    gathered: torch.Tensor  # (2, N, T, 2·D)
    addresses: torch.Tensor  # of the first half on each peer
    flags: torch.Tensor  # addresses of the flags on each peer
    size: int  # bytes of a half
    memory: tuple  # keeps the addresses valid


class Push(AllGather):
    """Gather keys and values with a kernel that writes them into the memory of the other GPUs
    of this host over NVLink (accel/kernels/push.py).
    """

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group)
        # Unused here, and its set-up can fail on shared GPUs.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symmetric

        from accel.kernels import push

        self.rank = dist.get_rank(group)
        self.symmetric = symmetric
        self.kernel = push
        self.buffers: dict = {}
        self.turn = 0

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        n, t, width = part.shape
        key = (n, self.size * t, width), part.dtype
        if key not in self.buffers:
            self.buffers[key] = self._allocate(*key, part.device)
        buffer = self.buffers[key]
        self.turn ^= 1
        offset = self.turn * buffer.size
        self.kernel.push(part, buffer.addresses, buffer.flags, self.rank, offset)
        return buffer.gathered[self.turn]

    def _allocate(self, shape, dtype, device):
        """Allocate the buffer for tensors of one shape. Not during a CUDA graph's capture."""
        size = torch.Size(shape).numel() * dtype.itemsize
        count = self.size * self.kernel.PROGRAMS
        with torch.inference_mode(False):
            memory = self.symmetric.empty(2 * size + 4 * count, dtype=torch.uint8, device=device)
            memory.zero_()
            handle = self.symmetric.rendezvous(memory, self.group)
            addresses = torch.tensor(handle.buffer_ptrs, device=device)
        torch.cuda.synchronize(device)
        # All flags must be zero before a peer sets one.
        dist.barrier(self.group, device_ids=[device.index])
        gathered = memory[: 2 * size].view(dtype).view(2, *shape)
        return _Buffer(gathered, addresses, addresses + 2 * size, size, (memory, handle))
