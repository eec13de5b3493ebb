"""Layout: how ranks divide a network evaluation. Placement: one rank's share of the pictures and
batch rows. Imports no torch.
"""

from typing import NamedTuple


class Layout(NamedTuple):
    """A grid of rows × tokens ranks that divide each network evaluation. 1 × 1: data parallel."""

    rows: int = 1  # number of parts of the batch
    tokens: int = 1  # number of parts of each row's tokens

    @property
    def ranks(self) -> int:
        """Number of ranks that share a network evaluation."""
        return self.rows * self.tokens

    def __str__(self):
        if self.ranks == 1:
            return "one rank per picture"
        given = {name: value for name, value in self._asdict().items() if value > 1}
        return ",".join(f"{name}={value}" for name, value in given.items())


OFF = Layout()


class Placement(NamedTuple):
    """The share of one of `world` ranks under `layout`. Default: a single process."""

    layout: Layout = OFF
    world: int = 1
    rank: int = 0

    @property
    def shared(self) -> bool:
        """Whether several ranks share a network evaluation."""
        return self.layout.ranks > 1

    @property
    def busy(self) -> int:
        """Number of ranks that are not idle."""
        return self.layout.ranks if self.shared else self.world

    def pictures(self, n: int) -> slice:
        """Return the slice of n pictures that this rank decodes: about equal sizes, in rank
        order; empty if idle.
        """
        return slice(_ceil(n * self.rank, self.busy), _ceil(n * (self.rank + 1), self.busy))

    def counts(self, n: int) -> list[int]:
        """Return the length of `pictures(n)` of each rank."""
        slices = [self._replace(rank=rank).pictures(n) for rank in range(self.world)]
        return [len(range(n)[pictures]) for pictures in slices]

    def batches(self, n: int, batch_size: int | None = None) -> list[slice]:
        """Return the batches that this rank denoises, as slices of n pictures: of its own
        pictures, or of all pictures if ranks share evaluations. batch_size: the most per slice.
        """
        pictures = self.pictures(n)
        if self.shared and self.rank < self.busy:
            pictures = slice(n)
        first, end, _ = pictures.indices(n)
        size = batch_size or max(1, end - first)
        return [slice(start, min(start + size, end)) for start in range(first, end, size)]

    def sizes(self, n: int, batch_size: int | None = None) -> set[int]:
        """Return the distinct sizes of the batches of all ranks."""
        sizes: set[int] = set()
        for rank in range(self.busy):
            batches = self._replace(rank=rank).batches(n, batch_size)
            sizes.update(batch.stop - batch.start for batch in batches)
        return sizes

    def rows(self, pictures: int, copies: int) -> tuple[int, int]:
        """Return the shape (latents, rows per latent) of this rank's batch when `pictures` are
        evaluated with `copies` batch rows each.
        """
        if self.shared:
            return _ceil(copies * pictures, self.layout.rows), 1
        return pictures, copies


def _ceil(number, divisor):
    return -(-number // divisor)
