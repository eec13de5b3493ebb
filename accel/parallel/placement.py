"""The pictures, batch rows and tokens that a rank computes."""

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from accel.parallel.layouts import OFF, Layout

if TYPE_CHECKING:  # brings torch.distributed
    from accel.parallel.processes import Job


class Placement(NamedTuple):
    """A rank of a job of `world` ranks that share network evaluations by `layout`. The
    default is one process.
    """

    layout: Layout = OFF
    world: int = 1
    rank: int = 0

    @property
    def shared(self) -> bool:
        """Return whether several ranks compute one network evaluation."""
        return self.layout.ranks > 1

    @property
    def busy(self) -> int:
        """Return the number of ranks that compute; the others are idle."""
        return self.layout.ranks if self.shared else self.world

    def pictures(self, n: int) -> slice:
        """Return this rank's slice of n pictures: in rank order, of about equal sizes;
        empty if idle.
        """
        return slice(-(-n * self.rank // self.busy), -(-n * (self.rank + 1) // self.busy))

    def batches(self, n: int, at_once: int | None = None) -> list[slice]:
        """Return the slices of n pictures that this rank denoises one after the other,
        each of at most `at_once`: its own pictures, or all pictures if ranks share
        evaluations.
        """
        own = slice(n) if self.shared and self.rank < self.busy else self.pictures(n)
        first, end, _ = own.indices(n)
        size = at_once or max(1, end - first)
        return [slice(start, min(start + size, end)) for start in range(first, end, size)]

    def sizes(self, n: int, at_once: int | None = None) -> set[int]:
        """Return the numbers of pictures in the slices of `batches`, of all ranks."""
        ranks = (self._replace(rank=rank) for rank in range(self.busy))
        return {part.stop - part.start for one in ranks for part in one.batches(n, at_once)}

    def rows(self, pictures: int, copies: int) -> tuple[int, int]:
        """Return (latents, batch rows of each) of an evaluation of `pictures` on this
        rank. copies: batch rows of a picture.
        """
        if self.layout.rows * self.layout.tokens > 1:
            return -(-copies * pictures // self.layout.rows), 1
        return pictures, copies

    def row_tokens(self, pictures: int, copies: int, tokens: int) -> int:
        """Return the tokens in each of this rank's GEMMs: batch rows × its part of a
        row's `tokens`.
        """
        return prod(self.rows(pictures, copies)) * (tokens // self.layout.tokens)

    def own(self, job: "Job", latents: Tensor, n: int) -> Tensor:
        """Return the latents of this rank's own pictures. latents: of `batches`. Raises
        RuntimeError if ranks that share evaluations computed different latents.
        """
        if not self.shared:
            return latents
        job.assert_identical(latents, self.busy)
        return latents[self.pictures(n)]

    def gather(self, job: "Job", part: Tensor, n: int) -> Tensor | None:
        """Gather every rank's own pictures (n', …). Return all pictures (n, …) on rank 0,
        None elsewhere.
        """
        if self.world == 1:
            return part
        sizes = [len(range(n)[self._replace(rank=rank).pictures(n)]) for rank in range(self.world)]
        padded = part.new_zeros(max(sizes), *part.shape[1:])  # a collective wants equal shapes
        padded[: len(part)] = part
        parts = job.gather(padded)
        return parts and torch.cat([pictures[:size] for pictures, size in zip(parts, sizes)])
