"""Layouts: as users write them, which cannot run, and which auto chooses. Imports no torch."""

from itertools import product
from math import gcd, prod

from accel.errors import UsageError, shown
from accel.ranks.placement import EXCHANGES, Layout, Placement

# A rank keeps this much of a row, tokens × width. Measured on two ranks: dividing 1024 tokens of
# width 1152 is faster, and 256 of width 4096; 256 of width 1152 is not.
LEAST = 1 << 19


def parse(text: str) -> Layout:
    """Return the layout that users write as rows=2,tokens=2,exchange=push. Raises UsageError."""
    values: dict = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        valid = value in EXCHANGES if name == "exchange" else _is_count(value)
        if name not in Layout._fields or name in values or not valid:
            wrong = shown("=".join((name or "nothing", value)))
            allowed = f"auto, off, or rows=N,tokens=N,exchange={'|'.join(EXCHANGES)}"
            raise UsageError(f"`parallel={shown(text)}`: {wrong}: give {allowed}")
        values[name] = value if name == "exchange" else int(value)
    if "exchange" in values and "tokens" not in values:
        raise UsageError(f"`parallel={text}`: exchange says how tokens are shared; add tokens=N")
    layout = Layout(**values)
    return layout if layout.tokens > 1 else Layout(layout.rows)


def _is_count(text):
    """Return whether `text` is a number of ranks."""
    return text.isdecimal() and len(text) < 5 and int(text) > 0


def check(
    layout: Layout, tier: str | None, tokens: int, heads: int, world: int, peers: bool
) -> None:
    """Raise UsageError if `layout`, with its exchange, cannot run.

    tokens: of a batch row; heads: of the network; world: number of ranks; peers: whether NVLink
    connects all of them.
    """
    if layout.ranks > world:
        raise UsageError(f"`parallel={layout}`: needs {layout.ranks} processes, there are {world}")
    if layout.exchange == "push" and (tier == "exact" or not peers):
        lacks = "keeps no float32 accuracy" if peers else "needs NVLink between all these GPUs"
        raise UsageError(f"`parallel=exchange=push`: {lacks}; take exchange=ulysses")
    divided = gcd(tokens, heads) if layout.exchange == "ulysses" else tokens
    if divided % layout.tokens:
        counts = [str(n) for n in range(1, world + 1) if divided % n == 0]
        raise UsageError(
            f"`parallel={layout}`: tokens={layout.tokens} does not divide the {tokens} tokens of a "
            f"row and, for ulysses, the {heads} heads; try {' or '.join(counts)}"
        )


def choose(
    pictures: int, at_once: int | None, copies: int, world: int, tokens: int, width: int
) -> Layout:
    """Return the layout of fewer pictures than ranks by which each rank computes least. Of equals
    it is the one that divides tokens among fewer ranks, since batch rows exchange nothing before
    an evaluation ends; then the one of fewer ranks.

    copies: batch rows of a picture. tokens: of a batch row, 1 if they cannot be divided; width: of
    the network.
    """
    columns = [
        n for n in range(1, world + 1) if n == 1 or tokens % n == 0 and tokens // n * width >= LEAST
    ]

    def load(layout):
        placement = Placement(layout, world)
        batches = placement.batches(pictures, at_once)
        rows = sum(prod(placement.rows(batch.stop - batch.start, copies)) for batch in batches)
        return rows / layout.tokens

    meshes = [Layout(*mesh) for mesh in product(range(1, world + 1), columns)]
    return min(
        (layout for layout in meshes if layout.ranks <= world),
        key=lambda layout: (load(layout), layout.tokens, layout.rows),
    )
