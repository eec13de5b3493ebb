"""Pictures over ranks: who computes which rows of a batch, and how they come back together."""

import torch


def share(n, world, rank):
    """The slice of n rows that `rank` computes: contiguous, in rank order, sizes differ by at most one."""
    return slice(-(-n * rank // world), -(-n * (rank + 1) // world))


def gather_rows(group, part, n):
    """Every rank's `share` of n rows, part (n', …) → all rows (n, …) on rank 0, None elsewhere."""
    if group.world == 1:
        return part
    sizes = [len(range(n)[share(n, group.world, rank)]) for rank in range(group.world)]
    padded = part.new_zeros(max(sizes), *part.shape[1:])  # a collective wants equal shapes
    padded[:len(part)] = part
    parts = group.gather(padded)
    return parts and torch.cat([rows[:size] for rows, size in zip(parts, sizes)])
