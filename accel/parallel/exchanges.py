"""Attention between tokens on several GPUs: one exchange a layer, by name.

An exchange is called with a rank's packed projection qkv (N, t, 3·D) of its t = T / s
tokens and returns their attention over all T (N, t, D). Bytes that a rank receives in a
layer, with e bytes an element and s ranks:

    kv       all-gather of keys and values            2·N·(T−t)·D·e       one collective
    push     the same, written over NVLink            2·N·(T−t)·D·e       no collective: one kernel
    ulysses  all-to-all over heads and back           4·N·t·D·e·(s−1)/s   two   (Jacobs et al. 2023,
             arXiv:2309.14509)
"""

import os
from collections.abc import Callable

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


class KeysValues(Exchange):
    """All-gather of keys and values; queries stay."""

    def __call__(self, qkv: torch.Tensor, num_heads: int, attention: Callable) -> torch.Tensor:
        n, t, width = qkv.shape
        own = qkv[..., width // 3 :].contiguous()  # (N, t, 2·D)
        parts = own.new_empty(self.size, *own.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), own, group=self.group)
        # a view for one batch row, the usual case
        kv = parts.transpose(0, 1).reshape(n, self.size * t, -1)
        return attention_to(qkv, kv, num_heads)


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
            mine = self._to_heads(qkv.pair.flatten(0, 1)).unflatten(0, halves)  # (2, N, T, 3·D/s)
            out = attention(HighLow(mine, None), heads)
            return HighLow(self._to_tokens(out.pair.flatten(0, 1)).unflatten(0, halves), None)
        return self._to_tokens(attention(self._to_heads(qkv), heads))

    def _to_heads(self, qkv):
        """Exchange (N, t, 3·D), all heads → (N, T, 3·D/s), all tokens."""
        n, t, width = qkv.shape
        # (s, N, t, 3, D/s): to whom
        parts = qkv.view(n, t, 3, self.size, -1).permute(3, 0, 1, 2, 4).contiguous()
        mine = torch.empty_like(parts)  # from whom
        dist.all_to_all_single(mine, parts, group=self.group)
        return mine.transpose(0, 1).reshape(n, self.size * t, width // self.size)

    def _to_tokens(self, out):
        """Exchange back (N, T, D/s) → (N, t, D)."""
        n, total, width = out.shape
        # (s, N, t, D/s)
        parts = out.view(n, self.size, total // self.size, width).transpose(0, 1).contiguous()
        mine = torch.empty_like(parts)
        dist.all_to_all_single(mine, parts, group=self.group)
        return mine.permute(1, 2, 0, 3).reshape(n, total // self.size, self.size * width)


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
        self.buffers = {}
        self.turn = 0

    def __call__(self, qkv: torch.Tensor, num_heads: int, attention: Callable) -> torch.Tensor:
        n, t, width = qkv.shape
        gathered, addresses, flags, size, _ = self._buffer(
            (n, self.size * t, width // 3 * 2), qkv.dtype, qkv.device
        )
        self.turn ^= 1
        self.kernel.push(qkv[..., width // 3 :], addresses, flags, self.rank, self.turn * size)
        return attention_to(qkv, gathered[self.turn], num_heads)

    def _buffer(self, shape, dtype, device):
        """Return two gathered tensors and the peers' addresses of them. They take turns:
        a peer may be one layer ahead.
        """
        key = shape, dtype
        if key not in self.buffers:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "push: the first call with a shape allocates; run the step once before its "
                    "capture"
                )
            size = torch.Size(shape).numel() * dtype.itemsize
            count = self.size * self.kernel.PROGRAMS
            with torch.inference_mode(False):
                memory = self.symmetric.empty(
                    2 * size + 4 * count, dtype=torch.uint8, device=device
                )
                memory.zero_()
                handle = self.symmetric.rendezvous(memory, self.group)
                addresses = torch.tensor(handle.buffer_ptrs, device=device)
            torch.cuda.synchronize(device)
            # flags are zero everywhere before the first is raised
            dist.barrier(self.group, device_ids=[device.index])
            gathered = [memory[i * size : (i + 1) * size].view(dtype).view(shape) for i in (0, 1)]
            self.buffers[key] = gathered, addresses, addresses + 2 * size, size, (memory, handle)
        return self.buffers[key]


EXCHANGES = {"kv": KeysValues, "ulysses": Ulysses, "push": Push}
