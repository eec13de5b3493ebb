"""Parse, check and choose the layout of --parallel. Imports no torch."""

from itertools import product
from math import prod

from accel.distributed import Layout, Placement
from accel.errors import UsageError, shown

# Least tokens × width per rank. Measured on two GPUs: splitting 1024 tokens of width 1152 or 256
# tokens of width 4096 is faster, splitting 256 tokens of width 1152 is not.
MIN_SHARE = 1 << 19


def parse(text: str) -> Layout:
    """Parse a layout such as rows=2,tokens=2. Raises UsageError."""
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
    """Raise UsageError if `layout` cannot run on `world` ranks. tokens: number per batch row."""
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
    """Choose the layout with the least work per rank, for fewer pictures than ranks. Ties: split
    tokens less, since batch rows need no exchange within an evaluation; then use fewer ranks.

    copies: batch rows per picture. tokens: number per batch row, 1 if they cannot be split.
    width: hidden size of the network.
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
