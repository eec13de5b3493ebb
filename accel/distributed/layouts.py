"""Layouts: as users write them, which cannot run, and which auto chooses. Imports no torch."""

from itertools import product
from math import prod

from accel.distributed.placement import Layout, Placement
from accel.errors import UsageError, shown

# A rank keeps this much of a row, tokens × width. Measured on two ranks: dividing 1024 tokens of
# width 1152 is faster, and 256 of width 4096; 256 of width 1152 is not.
MIN_SHARE = 1 << 19


def parse(text: str) -> Layout:
    """Return the layout that users write as rows=2,tokens=2. Raises UsageError."""
    values: dict[str, int] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        count = value.isdecimal() and len(value) < 5 and int(value) > 0
        if name not in Layout._fields or name in values or not count:
            wrong = shown("=".join((name or "nothing", value)))
            allowed = "auto, off, or rows=N,tokens=N"
            raise UsageError(f"{wrong}: give {allowed}", parameter="parallel", value=shown(text))
        values[name] = int(value)
    return Layout(**values)


def check(layout: Layout, tokens: int, world: int) -> None:
    """Raise UsageError if `layout` cannot run on `world` ranks. tokens: of a batch row."""
    if tokens % layout.tokens:
        raise UsageError(
            f"does not divide the {tokens} tokens of a row",
            "take a divisor",
            parameter="parallel",
            value=f"tokens={layout.tokens}",
        )
    if layout.ranks > world:
        raise UsageError(
            f"needs {layout.ranks} processes, there are {world}", parameter="parallel", value=layout
        )


def choose(
    pictures: int, batch_size: int | None, copies: int, world: int, tokens: int, width: int
) -> Layout:
    """Return the layout of fewer pictures than ranks by which each rank computes least. Of equals
    it is the one that divides tokens among fewer ranks, since batch rows exchange nothing before
    an evaluation ends; then the one of fewer ranks.

    copies: batch rows of a picture. tokens: of a batch row, 1 if they cannot be divided; width: of
    the network.
    """
    columns = [
        n
        for n in range(1, world + 1)
        if n == 1 or tokens % n == 0 and tokens // n * width >= MIN_SHARE
    ]

    def load(layout):
        placement = Placement(layout, world)
        batches = placement.batches(pictures, batch_size)
        rows = sum(prod(placement.rows(batch.stop - batch.start, copies)) for batch in batches)
        return rows / layout.tokens

    meshes = [Layout(*mesh) for mesh in product(range(1, world + 1), columns)]
    return min(
        (layout for layout in meshes if layout.ranks <= world),
        key=lambda layout: (load(layout), layout.tokens, layout.rows),
    )
