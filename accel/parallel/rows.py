"""Pictures over ranks: which rows of a batch a rank computes, and how rank 0 gets them all."""

import torch

from accel.parallel.processes import Job


def share(n: int, world: int, rank: int) -> slice:
    """The slice of n rows that `rank` of `world` computes: contiguous, in rank order, sizes differ by at most one."""
    return slice(-(-n * rank // world), -(-n * (rank + 1) // world))


def gather_rows(job: Job, part: torch.Tensor, n: int, busy: int) -> torch.Tensor | None:
    """Every rank's `share` among the first `busy` ranks, part (n', …) → all rows (n, …) on rank 0, None elsewhere."""
    if job.world == 1:
        return part
    sizes = [len(range(n)[share(n, busy, rank)]) for rank in range(job.world)]
    padded = part.new_zeros(max(sizes), *part.shape[1:])  # a collective wants equal shapes
    padded[: len(part)] = part
    parts = job.gather(padded)
    return parts and torch.cat([rows[:size] for rows, size in zip(parts, sizes)])
