"""How tokens that lie on several GPUs attend to each other: by name, one collective a layer where that is enough.

Every exchange is called with a rank's packed projection qkv (N, t, 3·D) of its t = T / ranks tokens and gives attention over all T for them
(N, t, D). In bytes that a rank and layer receives, e = bytes an element, s = ranks:

    kv       all-gather of keys and values         2·N·(T−t)·D·e          one collective
    push     the same, written over NVLink         2·N·(T−t)·D·e          no collective: one kernel
    ulysses  all-to-all over heads and back        4·N·t·D·e·(s−1)/s      two   (Jacobs et al. 2023, arXiv:2309.14509)
    ring     keys and values pass from rank to rank 2·N·(T−t)·D·e         s−1 sends, beside the products (Liu et al. 2023, arXiv:2310.01889)
"""

import os

import torch
import torch.distributed as dist

from accel.kernels.attention import attention_lse, attention_to
from accel.kernels.split_linear import HighLow


def traffic(exchange, rows, t, ranks, width, element):
    """(collectives, bytes that a rank receives) a layer, for `rows` rows of `t` tokens a rank, elements of so many bytes."""
    others = rows * t * (ranks - 1) * width * element  # one vector of each token that lies elsewhere
    return {
        "kv": (1, 2 * others),
        "push": (0, 2 * others),
        "ring": (0, 2 * others),
        "ulysses": (2, 4 * others // ranks),
    }[exchange]


class KeysValues:
    """All-gather of keys and values; queries stay."""

    def __init__(self, group, alone):
        self.group, self.size = group, dist.get_world_size(group)

    def __call__(self, qkv, num_heads, route="auto"):
        n, t, width = qkv.shape
        own = qkv[..., width // 3 :].contiguous()  # (N, t, 2D)
        parts = own.new_empty(self.size, *own.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), own, group=self.group)
        kv = parts.transpose(0, 1).reshape(n, self.size * t, -1)  # a view for one row, which is the case that counts
        return attention_to(qkv, kv, num_heads, route)


class Ulysses:
    """All-to-all: from a rank's tokens of all heads to all tokens of a rank's heads, packed, and back. The attention is `alone`, that of one GPU;
    so this exchange also serves pairs of float16 terms (accel.kernels.split_linear), whose two halves travel as rows."""

    def __init__(self, group, alone):
        self.group, self.size, self.alone = group, dist.get_world_size(group), alone

    def __call__(self, qkv, num_heads, route="auto"):
        if isinstance(qkv, HighLow):
            two, n = qkv.pair.shape[:2]
            mine = self._to_heads(qkv.pair.flatten(0, 1), num_heads).unflatten(0, (two, n))
            return HighLow(
                self._to_tokens(
                    self.alone(HighLow(mine, None), num_heads // self.size, route).pair.flatten(0, 1)
                ).unflatten(0, (two, n)),
                None,
            )
        return self._to_tokens(self.alone(self._to_heads(qkv, num_heads), num_heads // self.size, route))

    def _to_heads(self, qkv, num_heads):
        """(N, t, 3·D), all heads → (N, T, 3·D/s), all tokens."""
        n, t, width = qkv.shape
        parts = (
            qkv.view(n, t, 3, self.size, width // (3 * self.size)).permute(3, 0, 1, 2, 4).contiguous()
        )  # (s, N, t, 3, D/s): to whom
        mine = torch.empty_like(parts)  # from whom
        dist.all_to_all_single(mine, parts, group=self.group)
        return mine.transpose(0, 1).reshape(n, self.size * t, -1)

    def _to_tokens(self, out):
        """(N, T, D/s) → (N, t, D)."""
        n, total, width = out.shape
        out = out.view(n, self.size, total // self.size, width).transpose(0, 1).contiguous()  # (s, N, t, D/s): to whom
        back = torch.empty_like(out)
        dist.all_to_all_single(back, out, group=self.group)
        return back.permute(1, 2, 0, 3).reshape(n, total // self.size, self.size * width)


class Ring:
    """Keys and values travel around the ranks while each block of them is used; the partial results are merged by their log-sum-exp."""

    def __init__(self, group, alone):
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        ranks = dist.get_process_group_ranks(group)
        self.after, self.before = ranks[(self.rank + 1) % self.size], ranks[(self.rank - 1) % self.size]

    def __call__(self, qkv, num_heads, route="auto"):
        kv = qkv[..., qkv.shape[-1] // 3 :].contiguous()
        out = lse = None
        for turn in range(self.size):
            pending = ()
            if turn + 1 < self.size:
                following = torch.empty_like(kv)
                send, receive = (
                    dist.P2POp(dist.isend, kv, self.after, self.group),
                    dist.P2POp(dist.irecv, following, self.before, self.group),
                )
                # gloo pairs messages by order: one side must not wait in a send for the other's receive, which batching sees to.
                pending = dist.batch_isend_irecv([send, receive])
            part, part_lse = attention_lse(qkv, kv, num_heads, route)  # (N, t, D), (N, h, t)
            out, lse = (
                (part.float() if part.dtype.itemsize == 2 else part, part_lse)
                if out is None
                else merge(out, lse, part, part_lse)
            )
            for one in pending:
                one.wait()
            if pending:
                kv = following
        return out.to(qkv.dtype)


def merge(out, lse, part, part_lse):
    """Attention over two sets of keys from attention over each: out, part (N, t, D); lse, part_lse (N, h, t) natural → their union's.
    softmax over A ∪ B = (e^a·out + e^b·part) / (e^a + e^b) (Milakov & Gimelshein 2018, arXiv:1805.02867, eq. 4)."""
    heads = lse.shape[1]
    weight = (
        torch.sigmoid(part_lse - lse).transpose(1, 2).unsqueeze(-1).to(out.dtype)
    )  # (N, t, h, 1): e^b / (e^a + e^b)
    wide, part = out.unflatten(-1, (heads, -1)), part.unflatten(-1, (heads, -1)).to(out.dtype)
    return torch.lerp(wide, part, weight).flatten(2), torch.logaddexp(lse, part_lse)


class Push:
    """Keys and values written straight into the memory of peers on this host, over NVLink (accel/kernels/push.py)."""

    def __init__(self, group, alone):
        os.environ.setdefault(
            "TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"
        )  # not used here, and its set-up can fail where GPUs are shared
        import torch.distributed._symmetric_memory as symmetric

        from accel.kernels import push

        self.symmetric, self.kernel = symmetric, push
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.buffers, self.turn = {}, 0

    def _buffer(self, shape, dtype, device):
        """Two gathered tensors and the peers' addresses of them: in turn, since a peer may be one layer ahead."""
        key = shape, dtype
        if key not in self.buffers:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "push: a shape was first met inside a CUDA graph; run the step once before capturing it"
                )
            size = torch.Size(shape).numel() * dtype.itemsize
            count = self.size * self.kernel.PROGRAMS
            with torch.inference_mode(False):
                memory = self.symmetric.empty(2 * size + 4 * count, dtype=torch.uint8, device=device)
                memory.zero_()
                handle = self.symmetric.rendezvous(memory, self.group)
                addresses = torch.tensor(handle.buffer_ptrs, device=device)
            torch.cuda.synchronize(device)
            dist.barrier(self.group)  # flags are zero everywhere before the first is raised
            gathered = [memory[i * size : (i + 1) * size].view(dtype).view(shape) for i in (0, 1)]
            self.buffers[key] = gathered, addresses, addresses + 2 * size, size, (memory, handle)
        return self.buffers[key]

    def __call__(self, qkv, num_heads, route="auto"):
        n, t, width = qkv.shape
        gathered, addresses, flags, size, _ = self._buffer((n, self.size * t, width // 3 * 2), qkv.dtype, qkv.device)
        self.turn ^= 1
        self.kernel.push(qkv[..., width // 3 :], addresses, flags, self.rank, self.turn * size)
        return attention_to(qkv, gathered[self.turn], num_heads, route)


EXCHANGES = dict(kv=KeysValues, ulysses=Ulysses, ring=Ring, push=Push)
