"""Pictures over ranks: who computes which rows of a batch, and how they come back together."""

import hashlib

import torch


def share(n, world, rank):
    """The slice of n rows that `rank` computes: contiguous, in rank order, sizes differ by at most one."""
    return slice(-(-n * rank // world), -(-n * (rank + 1) // world))


def gather_rows(group, part, n, busy=None):
    """Every rank's `share` of n rows among the first `busy` ranks (all if not given), part (n', …) → all rows (n, …) on rank 0, None elsewhere."""
    if group.world == 1:
        return part
    busy = busy or group.world
    sizes = [len(range(n)[share(n, busy, rank)]) if rank < busy else 0 for rank in range(group.world)]
    padded = part.new_zeros(max(sizes), *part.shape[1:])  # a collective wants equal shapes
    padded[: len(part)] = part
    parts = group.gather(padded)
    return parts and torch.cat([rows[:size] for rows, size in zip(parts, sizes)])


def agree(group, latents, busy):
    """RuntimeError unless the first `busy` ranks hold the same latents, to the bit: each went its own way through the sampler, on the same numbers."""
    mine = hashlib.sha256(latents.cpu().numpy().tobytes()).hexdigest() if group.rank < busy else None
    told = group.tell("latents", mine)[:busy]
    if len(set(told)) > 1:
        raise RuntimeError(
            f"ranks ended with different latents (checksums {', '.join(one[:8] for one in told)}): are their GPUs of one kind?"
        )
