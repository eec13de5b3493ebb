"""Attention between tokens on several GPUs: one exchange a layer, by name.

An exchange is called with a rank's packed projection qkv (N, t, 3·D) of its t = T / s
tokens and returns their attention over all T (N, t, D). Bytes that a rank receives in a
layer, with e bytes an element and s ranks:

    push     keys and values, written over NVLink     2·N·(T−t)·D·e       one kernel
    ulysses  all-to-all over heads and back           4·N·t·D·e·(s−1)/s   two collectives
             (Jacobs et al. 2023, arXiv:2309.14509)
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from accel.kernels.attention import attention_to
from accel.kernels.split_linear import HighLow


class Exchange:
    """Attention over the tokens of all ranks of `group`: exchange(qkv (N, t, 3·D),
    num_heads, attention) → (N, t, D).

    attention: the network's own, for tokens that are all on this device.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def __call__(
        self, qkv: torch.Tensor, num_heads: int, attention: Callable
    ) -> torch.Tensor | HighLow:
        raise NotImplementedError


class Ulysses(Exchange):
    """All-to-all: from a rank's tokens of all heads to all tokens of a rank's heads, and
    back.

    The network's own attention runs, so this exchange keeps the exact tier's accuracy:
    the high and low halves of a HighLow travel as batch rows.
    """

    def __call__(
        self, qkv: torch.Tensor | HighLow, num_heads: int, attention: Callable
    ) -> torch.Tensor | HighLow:
        heads = num_heads // self.size
        if isinstance(qkv, HighLow):
            halves = qkv.pair.shape[:2]  # (2, N)
            pair = self._to_heads(qkv.pair.flatten(0, 1)).unflatten(0, halves)  # (2, N, T, 3·D/s)
            out = attention(HighLow(pair, None), heads)
            pair = self._to_tokens(out.pair.flatten(0, 1)).unflatten(0, halves)  # (2, N, t, D)
            return HighLow(pair, None)
        return self._to_tokens(attention(self._to_heads(qkv), heads))

    def _to_heads(self, qkv):
        """Exchange (N, t, 3·D), all heads → (N, T, 3·D/s), all tokens."""
        n, t, width = qkv.shape
        by_head = qkv.view(n, t, 3, self.size, -1).permute(3, 0, 1, 2, 4)
        sent = by_head.contiguous()  # (s, N, t, 3, D/s), by the rank that gets it
        received = torch.empty_like(sent)  # by the rank that sent it
        dist.all_to_all_single(received, sent, group=self.group)
        return received.transpose(0, 1).reshape(n, self.size * t, width // self.size)

    def _to_tokens(self, out):
        """Exchange back (N, T, D/s) → (N, t, D)."""
        n, total, width = out.shape
        t = total // self.size
        sent = out.view(n, self.size, t, width).transpose(0, 1).contiguous()  # (s, N, t, D/s)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received.permute(1, 2, 0, 3).reshape(n, t, self.size * width)


class _Buffer(NamedTuple):
    """Two gathered tensors in the memory of every peer. They take turns: a peer may be one
    layer ahead.
    """

    gathered: tuple[torch.Tensor, torch.Tensor]
    addresses: torch.Tensor  # of the first tensor at each peer
    flags: torch.Tensor  # addresses of the flags at each peer
    size: int  # bytes of a gathered tensor
    memory: tuple  # what the addresses keep alive


class Push(Exchange):
    """Write keys and values straight into the memory of peers on this host, over NVLink
    (accel/kernels/push.py).
    """

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group)
        # Multicast is not used, and its set-up can fail where GPUs are shared.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symmetric

        from accel.kernels import push

        self.symmetric = symmetric
        self.kernel = push
        self.buffers: dict = {}
        self.turn = 0

    def __call__(self, qkv: torch.Tensor, num_heads: int, attention: Callable) -> torch.Tensor:
        n, t, width = qkv.shape
        shape = n, self.size * t, width // 3 * 2
        key = shape, qkv.dtype
        if key not in self.buffers:
            self.buffers[key] = self._allocate(*key, qkv.device)
        buffer = self.buffers[key]
        self.turn ^= 1
        self.kernel.push(
            qkv[..., width // 3 :],
            buffer.addresses,
            buffer.flags,
            self.rank,
            self.turn * buffer.size,
        )
        return attention_to(qkv, buffer.gathered[self.turn], num_heads)

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


EXCHANGES = {"ulysses": Ulysses, "push": Push}
