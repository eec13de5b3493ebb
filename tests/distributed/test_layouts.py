"""Test the refusals of `--parallel`, and the layout that `auto` chooses."""

from dataclasses import replace

import pytest
from conftest import mistake
from networks import run_of

from accel.distributed import OFF, Layout, Placement, Ranks, layouts
from accel.errors import UsageError
from accel.jobs.parallel import choose_layout
from accel.runtime.precision import TIERS

WIDTH = 1152  # of XL/2


class Several(Ranks):
    """Rank 0 of several. It is not connected."""

    def __init__(self, world, peers=False):
        super().__init__()
        self.world = world
        self._peers = peers

    def has_peer_access(self):
        return self._peers


def wanted(parallel, peers=False, world=4, precision="fp16", **more):
    """The layout of a grid at 512 px without guidance on ranks of GPUs."""
    run = run_of("DiT-XL/2", parallel=parallel, cfg_scale=1.0, **more)
    run = replace(run, settings=replace(run.settings, precision=precision))
    return choose_layout(run, Several(world, peers))


@pytest.mark.parametrize(
    "text, message",
    (
        ("rows=8", "--parallel rows=8: needs 8 processes, there are 4"),
        ("tokens=3", "--parallel tokens=3: does not divide the 1024 tokens of a row; take a divis"),
        ("rows=0", "--parallel rows=0: rows=0: give auto, off, or rows=N,tokens=N"),
        ("row=2", "--parallel row=2: row=2: give"),
        ("weights=2", "--parallel weights=2: weights=2: give"),
        ("rows=2,rows=4", "rows=4: give"),
        (
            "tokens=2,exchange=push",
            "--parallel tokens=2,exchange=push: exchange=push: give auto, off, or rows=N,tokens=N",
        ),
        ("fast", "--parallel fast: fast=: give"),
        (
            "rows=2,tokens=2 exact",
            "--parallel rows=2,tokens=2: tokens are not divided in the tier exact; take rows=2",
        ),
    ),
)
def test_refusals(text, message):
    parallel, *precision = text.split()
    with pytest.raises(UsageError) as error:
        wanted(parallel, precision=precision[0] if precision else "fp16")
    assert message in error.value.by_flags()


def test_tokens_are_not_divided_in_a_tier_that_does_not_support_it(monkeypatch):
    monkeypatch.setitem(TIERS, "bf16", TIERS["bf16"]._replace(splits_tokens=False))
    with mistake("parallel", "in the tier bf16", "rows=2"):
        wanted("rows=2,tokens=2", precision="bf16")


def test_what_is_wanted():
    assert wanted("rows=2,tokens=2") == wanted("rows=2,tokens=2", peers=True) == Layout(2, 2)
    assert wanted("rows=2", precision="exact") == Layout(2)
    assert wanted("off") == wanted("rows=1") == wanted("tokens=1") == OFF
    assert wanted("auto", labels=("1",) * 4) == OFF


def test_ranks_that_are_left_over_denoise_nothing():
    shares = [Placement(Layout(2), world=3, rank=rank).batches(1) for rank in range(3)]
    assert shares == [[slice(0, 1)], [slice(0, 1)], []]


def test_the_sizes_of_all_ranks_batches():
    assert Placement(world=3).sizes(7) == {2, 3}
    assert Placement(world=3).sizes(7, batch_size=2) == {1, 2}


def test_auto_divides_tokens_over_nvlink_alone():
    """One picture without guidance is one batch row: its tokens are divided or nothing is."""
    assert wanted("auto", labels=("1",)) == OFF
    assert wanted("auto", peers=True, labels=("1",)) == Layout(1, 2)
    assert wanted("auto", peers=True, labels=("1",), precision="exact") == OFF


@pytest.mark.parametrize(
    "pictures, batch_size, copies, world, tokens, width, layout",
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
def test_auto(pictures, batch_size, copies, world, tokens, width, layout):
    """Never a layout that gives no rank less to do than another of fewer ranks."""
    assert layouts.choose(pictures, batch_size, copies, world, tokens, width) == layout
