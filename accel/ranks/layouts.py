"""Layouts: how ranks share a network evaluation, as users write it, and the pictures, batch rows
and tokens that a rank then computes. Imports no torch.
"""

from math import prod
from typing import NamedTuple

from accel.errors import UsageError, shown

EXCHANGES = ("kv", "push", "ulysses")  # of accel/ranks/exchanges.py
TOGETHER = {"rows", "tokens", "exchange"}, {"weights"}  # names that a layout may have at once


class Layout(NamedTuple):
    """The division of a network evaluation among ranks. All ones: each rank has pictures
    of its own (data parallel).
    """

    rows: int = 1  # ranks that divide the batch rows
    tokens: int = 1  # ranks that divide the tokens of each row
    exchange: str = "kv"  # of tokens
    # Ranks that divide every layer's weights: neither rows nor tokens are divided then.
    weights: int = 1

    @property
    def ranks(self) -> int:
        """Return the number of ranks that share a network evaluation."""
        return self.rows * self.tokens * self.weights

    def __str__(self):
        if self.ranks == 1:
            return "one GPU per picture"
        if self.weights > 1:
            return f"weights={self.weights}"
        if self.tokens > 1:
            return f"rows={self.rows},tokens={self.tokens},exchange={self.exchange}"
        return f"rows={self.rows}"


OFF = Layout()


def parse(text: str, exchange: str = "kv") -> Layout:
    """Return the layout that users write as rows=2,tokens=2,exchange=kv. exchange: the
    default. Raises UsageError.
    """
    items = [item.partition("=")[::2] for item in text.split(",")]
    values = dict(items)
    once = len(values) == len(items)
    combined = any(values.keys() <= names for names in TOGETHER)
    for name, value in items:
        valid = value in EXCHANGES if name == "exchange" else _is_count(value)
        if not (once and combined and valid):
            wrong = shown("=".join((name or "nothing", value)))
            allowed = f"auto, off, rows=N,tokens=N,exchange={'|'.join(EXCHANGES)}, or weights=N"
            raise UsageError(f"`parallel={shown(text)}`: {wrong}: give {allowed}")
    if "exchange" in values and "tokens" not in values:
        raise UsageError(f"`parallel={text}`: exchange says how tokens are shared; add tokens=N")
    exchange = values.pop("exchange", exchange)
    counts = {name: int(value) for name, value in values.items()}
    layout = Layout(**counts, exchange=exchange)
    return layout if layout.ranks > 1 else OFF


def _is_count(text):
    """Return whether `text` is a number of ranks."""
    return text.isdecimal() and len(text) < 5 and int(text) > 0


def check(
    layout: Layout,
    tier: str | None,
    tokens: int | None = None,
    heads: int | None = None,
    world: int | None = None,
) -> None:
    """Raise UsageError if `layout` cannot run. None is a value that is not known yet.

    tokens: of a batch row; heads: of the network; world: number of ranks.
    """
    problem = _problem(layout, tier, tokens, heads, world)
    if problem:
        raise UsageError(f"`parallel={problem}")


def _problem(layout, tier, tokens, heads, world):
    """Return what `layout` lacks to run and the remedy, after the parameter's name; None if
    it can run.
    """
    exchange = layout.exchange if layout.tokens > 1 else None
    if exchange not in (None, "ulysses") and tier == "exact":
        return (
            f"exchange={exchange}`: keeps no float32 accuracy; take exchange=ulysses with "
            "`precision=exact`"
        )
    if world and layout.ranks > world:
        return f"{layout}`: needs {layout.ranks} processes, there are {world}"
    if heads and heads % layout.weights:
        remedy = _divisors(heads, world)
        return f"weights={layout.weights}`: does not divide {heads} heads; {remedy}"
    if tokens and tokens % layout.tokens:
        remedy = _divisors(tokens, world)
        return f"tokens={layout.tokens}`: does not divide the {tokens} tokens of a row; {remedy}"
    if heads and exchange == "ulysses" and heads % layout.tokens:
        return (
            f"tokens={layout.tokens},exchange=ulysses`: does not divide {heads} heads; take "
            "exchange=kv"
        )
    return None


def _divisors(number, world):
    """Return the numbers of ranks that divide `number`, as a remedy."""
    counts = range(1, (world or 8) + 1)
    return "try " + " or ".join(str(count) for count in counts if number % count == 0)


class BatchRows(NamedTuple):
    """The batch of a network evaluation on a rank."""

    latents: int
    copies: int  # batch rows of each latent


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

    def batches(self, n: int, at_once: int | None = None) -> list[slice]:
        """Return the slices of n pictures that this rank denoises one after the other,
        each of at most `at_once`: its own pictures, or all pictures if ranks share
        evaluations.
        """
        pictures = self.pictures(n)
        if self.shared and self.rank < self.busy:
            pictures = slice(n)
        first, end, _ = pictures.indices(n)
        size = at_once or max(1, end - first)
        return [slice(start, min(start + size, end)) for start in range(first, end, size)]

    def sizes(self, n: int, at_once: int | None = None) -> set[int]:
        """Return the numbers of pictures in the slices of `batches`, of all ranks."""
        sizes: set[int] = set()
        for rank in range(self.busy):
            batches = self._replace(rank=rank).batches(n, at_once)
            sizes.update(batch.stop - batch.start for batch in batches)
        return sizes

    def rows(self, pictures: int, copies: int) -> BatchRows:
        """Return the batch of an evaluation of `pictures` on this rank. copies: batch rows
        of a picture.
        """
        if self.layout.rows * self.layout.tokens > 1:
            return BatchRows(_ceil(copies * pictures, self.layout.rows), 1)
        return BatchRows(pictures, copies)

    def row_tokens(self, pictures: int, copies: int, tokens: int) -> int:
        """Return the tokens in each of this rank's GEMMs: batch rows × its part of a
        row's `tokens`.
        """
        return prod(self.rows(pictures, copies)) * (tokens // self.layout.tokens)


def _ceil(number, divisor):
    return -(-number // divisor)
