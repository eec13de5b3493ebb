"""Layouts as users write them, and those that cannot run. Imports no torch."""

from accel.errors import UsageError, shown
from accel.ranks.placement import EXCHANGES, OFF, Layout


def parse(text: str, exchange: str = "kv") -> Layout:
    """Return the layout that users write as rows=2,tokens=2,exchange=kv. exchange: the
    default. Raises UsageError.
    """
    items = [item.partition("=")[::2] for item in text.split(",")]
    values = dict(items)
    once = len(values) == len(items)
    for name, value in items:
        valid = value in EXCHANGES if name == "exchange" else _is_count(value)
        if not (once and name in Layout._fields and valid):
            wrong = shown("=".join((name or "nothing", value)))
            allowed = f"auto, off, or rows=N,tokens=N,exchange={'|'.join(EXCHANGES)}"
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
