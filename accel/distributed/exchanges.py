"""Attention between tokens on several GPUs: one exchange of keys and values a layer.

Each of s ranks has t = T / s tokens. It receives 2·N·(T−t)·D·e bytes in a layer, with e bytes an
element: by torch.distributed, or over NVLink by one kernel that writes.
"""

import os
from typing import NamedTuple

import torch
import torch.distributed as dist

from accel.kernels.attention import attention_to


class AllGather:
    """Attention of a rank's tokens to the tokens of all ranks of `group`, by torch.distributed:
    for CPUs, and for GPUs without NVLink.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.size = dist.get_world_size(group)

    def __call__(self, qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Compute attention: qkv (N, t, 3·D) → (N, t, D)."""
        width = qkv.shape[-1] // 3
        return attention_to(qkv, self.gather(qkv[..., width:]), num_heads)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Gather keys and values: (N, t, 2·D) of this rank → (N, T, 2·D)."""
        local = part.contiguous()
        parts = local.new_empty(self.size, *local.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), local, group=self.group)
        return parts.transpose(0, 1).flatten(1, 2)


class _Buffer(NamedTuple):
    """Two gathered tensors in the memory of every peer. They take turns: a peer may be one
    layer ahead.
    """

    gathered: tuple[torch.Tensor, torch.Tensor]
    addresses: torch.Tensor  # of the first tensor at each peer
    flags: torch.Tensor  # addresses of the flags at each peer
    size: int  # bytes of a gathered tensor
    memory: tuple  # what the addresses keep alive


class Push(AllGather):
    """Gather keys and values by one kernel that writes them into the memory of the peers on this
    host, over NVLink (accel/kernels/push.py).
    """

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group)
        # Multicast is not used, and its set-up can fail where GPUs are shared.
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
        shape = n, self.size * t, width
        key = shape, part.dtype
        if key not in self.buffers:
            self.buffers[key] = self._allocate(*key, part.device)
        buffer = self.buffers[key]
        self.turn ^= 1
        offset = self.turn * buffer.size
        self.kernel.push(part, buffer.addresses, buffer.flags, self.rank, offset)
        return buffer.gathered[self.turn]

    def _allocate(self, shape, dtype, device):
        """Return the buffer of gathered tensors of a shape."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "push: the first call with a shape allocates; run the step once before its capture"
            )
        size = torch.Size(shape).numel() * dtype.itemsize
        count = self.size * self.kernel.PROGRAMS
        with torch.inference_mode(False):
            memory = self.symmetric.empty(2 * size + 4 * count, dtype=torch.uint8, device=device)
            memory.zero_()
            handle = self.symmetric.rendezvous(memory, self.group)
            addresses = torch.tensor(handle.buffer_ptrs, device=device)
        torch.cuda.synchronize(device)
        # Flags are zero everywhere before the first is raised.
        dist.barrier(self.group, device_ids=[device.index])
        first = memory[:size].view(dtype).view(shape)
        second = memory[size : 2 * size].view(dtype).view(shape)
        return _Buffer((first, second), addresses, addresses + 2 * size, size, (memory, handle))
