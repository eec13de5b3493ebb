"""Layout: how ranks share a network evaluation. Placement: the pictures, batch rows and tokens
that a rank then computes. Imports no torch.
"""

from typing import NamedTuple


class Layout(NamedTuple):
    """The division of a network evaluation among ranks. All ones: each rank has pictures
    of its own (data parallel).
    """

    rows: int = 1  # ranks that divide the batch rows
    tokens: int = 1  # ranks that divide the tokens of each row

    @property
    def ranks(self) -> int:
        """Return the number of ranks that share a network evaluation."""
        return self.rows * self.tokens

    def __str__(self):
        if self.ranks == 1:
            return "one rank per picture"
        given = {name: value for name, value in self._asdict().items() if value > 1}
        return ",".join(f"{name}={value}" for name, value in given.items())


OFF = Layout()


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
        return slice(_ceil(n * self.rank, self.busy), _ceil(n * (self.rank + 1), self.busy))

    def counts(self, n: int) -> list[int]:
        """Return the number of own pictures of every rank, of n pictures."""
        slices = [self._replace(rank=rank).pictures(n) for rank in range(self.world)]
        return [len(range(n)[pictures]) for pictures in slices]

    def batches(self, n: int, batch_size: int | None = None) -> list[slice]:
        """Return the slices of n pictures that this rank denoises one after the other,
        each of at most `batch_size`: its own pictures, or all pictures if ranks share
        evaluations.
        """
        pictures = self.pictures(n)
        if self.shared and self.rank < self.busy:
            pictures = slice(n)
        first, end, _ = pictures.indices(n)
        size = batch_size or max(1, end - first)
        return [slice(start, min(start + size, end)) for start in range(first, end, size)]

    def sizes(self, n: int, batch_size: int | None = None) -> set[int]:
        """Return the numbers of pictures in the slices of `batches`, of all ranks."""
        sizes: set[int] = set()
        for rank in range(self.busy):
            batches = self._replace(rank=rank).batches(n, batch_size)
            sizes.update(batch.stop - batch.start for batch in batches)
        return sizes

    def rows(self, pictures: int, copies: int) -> tuple[int, int]:
        """Return the latents of an evaluation of `pictures` on this rank, and the batch rows of
        each. copies: batch rows of a picture.
        """
        if self.shared:
            return _ceil(copies * pictures, self.layout.rows), 1
        return pictures, copies


def _ceil(number, divisor):
    return -(-number // divisor)
