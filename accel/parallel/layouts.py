"""Layouts: how ranks share a network evaluation, as users write it. Imports no torch."""

from typing import NamedTuple

from accel.errors import UsageError, shown

EXCHANGES = ("kv", "push", "ulysses")  # of accel/parallel/exchanges.py
TOGETHER = {"rows", "tokens", "exchange"}, {"weights"}  # the names that a layout may have at once


class Layout(NamedTuple):
    """The division of a network evaluation among ranks. All ones: each rank has pictures
    of its own (data parallel).
    """

    rows: int = 1  # ranks that divide the batch rows
    tokens: int = 1  # ranks that divide the tokens of each row
    exchange: str = "kv"  # of tokens
    # ranks that divide every layer's weights; then neither rows nor tokens are divided
    weights: int = 1

    @property
    def ranks(self) -> int:
        """Return the number of ranks that share a network evaluation."""
        return self.rows * self.tokens * self.weights

    def __str__(self):
        if self.ranks == 1:
            return "a GPU a picture"
        if self.weights > 1:
            return f"weights={self.weights}"
        return f"rows={self.rows}" + (
            f",tokens={self.tokens},exchange={self.exchange}" if self.tokens > 1 else ""
        )


OFF = Layout()


def parse(text: str, exchange: str = "kv") -> Layout:
    """Return the layout that users write as rows=2,tokens=2,exchange=kv; exchange: the
    default. Raises UsageError.
    """
    items = [item.partition("=")[::2] for item in text.split(",")]
    given = dict(items)
    known = len(given) == len(items) and any(given.keys() <= names for names in TOGETHER)
    for name, value in items:
        number = value.isdecimal() and len(value) < 5 and int(value) > 0
        if not known or not (value in EXCHANGES if name == "exchange" else number):
            wrong = shown("=".join((name or "nothing", value)))
            allowed = f"auto, off, rows=N,tokens=N,exchange={'|'.join(EXCHANGES)}, or weights=N"
            raise UsageError(f"`parallel={shown(text)}`: {wrong}: give {allowed}")
    if "exchange" in given and "tokens" not in given:
        raise UsageError(f"`parallel={text}`: exchange says how tokens are shared; add tokens=N")
    numbers = {name: int(value) for name, value in items if name != "exchange"}
    layout = Layout(**{"exchange": given.get("exchange", exchange), **numbers})
    return layout if layout.ranks > 1 else OFF


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
    problem = None
    exchange = layout.exchange if layout.tokens > 1 else None
    if exchange not in (None, "ulysses") and tier == "exact":
        problem = (
            f"exchange={exchange}`: keeps no float32 accuracy; take exchange=ulysses with "
            "`precision=exact`"
        )
    elif world and layout.ranks > world:
        problem = f"{layout}`: needs {layout.ranks} processes, there are {world}"
    elif heads and heads % layout.weights:
        problem = (
            f"weights={layout.weights}`: does not divide {heads} heads; {_divisors(heads, world)}"
        )
    elif tokens and tokens % layout.tokens:
        problem = (
            f"tokens={layout.tokens}`: does not divide the {tokens} tokens of a row; "
            f"{_divisors(tokens, world)}"
        )
    elif heads and exchange == "ulysses" and heads % layout.tokens:
        problem = (
            f"tokens={layout.tokens},exchange=ulysses`: does not divide {heads} heads; take "
            "exchange=kv"
        )
    if problem:
        raise UsageError(f"`parallel={problem}")


def _divisors(number, world):
    return "try " + " or ".join(
        str(ranks) for ranks in range(1, (world or 8) + 1) if number % ranks == 0
    )
