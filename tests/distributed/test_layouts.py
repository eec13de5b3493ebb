"""What `--parallel` refuses, and the layout that `auto` chooses."""

from types import SimpleNamespace

import pytest

from accel.config import Grid
from accel.errors import UsageError
from accel.parallel import choose_layout
from accel.ranks import Ranks, exchanges, layouts, placement
from accel.ranks.placement import OFF, Layout

TOKENS = 1024
WIDTH = 1152  # of XL/2


class Several(Ranks):
    """Rank 0 of several. It is not connected."""

    def __init__(self, world, peers=False):
        super().__init__()
        self.world = world
        self._peers = peers

    def peers(self):
        return self._peers


def wanted(parallel, peers=False, world=4, **more):
    """The layout of a grid at 512 px of six heads on ranks, as the command takes it."""
    grid = Grid.of("DiT-S/2", parallel=parallel, **more)
    grid.check()
    stage = SimpleNamespace(prepended=0, width=WIDTH, num_heads=6)
    fit = SimpleNamespace(empty=lambda side: SimpleNamespace(stages=[stage]), null_class=False)
    opened = SimpleNamespace(fit=fit, guide=None, tokens=TOKENS, latent_size=64, config=grid.config)
    return choose_layout(grid, opened, Several(world, peers))


@pytest.mark.parametrize(
    "text, message",
    (
        ("rows=8", "--parallel rows=8: needs 8 processes, there are 4"),
        ("tokens=3 push", "tokens=3 does not divide the 1024 tokens of a row"),
        (
            "tokens=4",
            "does not divide the 1024 tokens of a row and, for ulysses, the 6 heads; try 1",
        ),
        (
            "tokens=2,exchange=push",
            "--parallel exchange=push: needs NVLink between all these GPUs; take exchange=ulysses",
        ),
        (
            "rows=0",
            "--parallel rows=0: rows=0: give auto, off, or rows=N,tokens=N,exchange=push|ulysses",
        ),
        ("row=2", "--parallel row=2: row=2: give"),
        ("weights=2", "--parallel weights=2: weights=2: give"),
        ("rows=2,rows=4", "rows=4: give"),
        ("rows=2,exchange=push", "exchange=push: exchange says how tokens are shared; add tokens"),
        ("tokens=2,exchange=kv", "exchange=kv: give"),
        ("fast", "--parallel fast: fast=: give"),
        (
            "tokens=2,exchange=push push exact",
            "exchange=push: keeps no float32 accuracy; take exchange=ulysses",
        ),
    ),
)
def test_refusals(text, message):
    parallel, *more = text.split()
    precision = "exact" if "exact" in more else None
    with pytest.raises(UsageError) as error:
        wanted(parallel, "push" in more, precision=precision)
    assert message in error.value.by_flags()


def test_what_is_wanted():
    """The layout that the user names, by the exchange that the machine and the tier allow."""
    assert wanted("rows=2,tokens=2") == Layout(2, 2, "ulysses")
    assert wanted("rows=2,tokens=2", peers=True) == Layout(2, 2, "push")
    assert wanted("tokens=2", peers=True, precision="exact") == Layout(1, 2, "ulysses")
    assert wanted("tokens=2,exchange=ulysses", peers=True) == Layout(1, 2, "ulysses")
    assert wanted("off") == OFF and wanted("auto", labels=("1",) * 4) == OFF


def test_auto_divides_tokens_over_nvlink_alone():
    """Of one picture without guidance, a batch row."""
    assert wanted("auto", labels=("1",)) == OFF
    assert wanted("auto", peers=True, labels=("1",)) == Layout(1, 2, "push")
    assert wanted("auto", peers=True, labels=("1",), precision="exact") == OFF


def test_the_flag_knows_what_there_is():
    """accel/ranks/placement.py is read before torch, so it has names of its own."""
    assert set(placement.EXCHANGES) == set(exchanges.EXCHANGES)
    for name in Layout._fields:
        text = "tokens=2,exchange=push" if name == "exchange" else f"{name}=2"
        assert getattr(layouts.parse(text), name) != getattr(OFF, name)


@pytest.mark.parametrize("text", ("rows=1", "tokens=1,exchange=push"))
def test_a_mesh_of_one_is_no_mesh(text):
    """Whatever else it names: a GPU a picture waits for no other."""
    assert wanted(text) == OFF


@pytest.mark.parametrize(
    "pictures, at_once, copies, world, tokens, width, layout",
    (
        # What was measured as the fastest.
        (1, None, 2, 2, 256, WIDTH, Layout(2)),
        (1, None, 2, 2, 1024, WIDTH, Layout(2)),
        (1, None, 2, 4, 1024, WIDTH, Layout(2, 2)),
        (1, None, 2, 4, 4096, WIDTH, Layout(2, 2)),
        (1, None, 2, 4, 256, 4096, Layout(2, 2)),
        # Too few tokens for a rank; none that can be divided.
        (1, None, 2, 4, 256, WIDTH, Layout(2)),
        (1, None, 2, 4, 1, WIDTH, Layout(2)),
        (1, None, 2, 8, 1024, WIDTH, Layout(2, 2)),
        (1, None, 2, 8, 4096, WIDTH, Layout(2, 4)),
        # Two of six batch rows on four ranks are two on three; one and a half is less.
        (3, None, 2, 4, 1, WIDTH, OFF),
        (3, None, 2, 4, 1024, WIDTH, Layout(2, 2)),
        (2, None, 2, 4, 1, WIDTH, Layout(4)),
        # One picture at a time.
        (3, 1, 2, 4, 1, WIDTH, OFF),
        # Without guidance a picture is one batch row.
        (1, None, 1, 2, 1, WIDTH, OFF),
        (1, None, 1, 2, 1024, WIDTH, Layout(1, 2)),
        (1, None, 2, 3, 999, WIDTH, Layout(2)),
    ),
)
def test_auto(pictures, at_once, copies, world, tokens, width, layout):
    """Never a layout that gives no rank less to do than another of fewer ranks."""
    assert layouts.choose(pictures, at_once, copies, world, tokens, width) == layout
