"""One evaluation on a mesh of real processes over gloo: equal to one process, and no byte more between them than
arithmetic says."""

import json
from math import prod

import pytest
from jobs import run

from accel.parallel.layouts import Layout
from accel.parallel.placement import Placement

T, D, DEPTH, PATCH = 36, 96, 3, 32  # of sharded_worker.py; the last: values that the output has a token, p·p·2C


@pytest.fixture(scope="module")
def results():
    """What every one of four ranks found, on meshes of two, three and four; the smaller leave some idle."""
    ranks = json.loads(run(4, script="tests/distributed/sharded_worker.py").splitlines()[0])
    assert len(ranks) == 4 and len(ranks[0]) > len(ranks[2]) > len(ranks[3])
    return [row for rank in ranks for row in rank]


def of_kind(results, *kinds):
    rows = [row for row in results if row["kind"] in kinds]
    assert rows
    return rows


def test_equal_to_one_process(results):
    seen = {(*row["layout"][:3], row["kind"]) for row in of_kind(results, "plain", "split")}
    exchanges = {(1, tokens, name, "plain") for tokens in (2, 3, 4) for name in ("kv", "ulysses")}
    assert exchanges | {(1, 3, "ulysses", "split"), (3, 1, "kv", "plain"), (2, 2, "kv", "plain")} <= seen
    for row in of_kind(results, "plain", "split"):
        assert row["size"] > 0.5 and row["error"] <= 1e-5, row


def test_the_engine_warms_up_for_what_a_rank_evaluates(results):
    """A placement names the batch rows and row tokens that Network.tune is given."""
    for row in of_kind(results, "plain", "split"):
        placement = Placement(Layout(*row["layout"]), 4)
        rows, tokens = row["evaluated"]
        assert rows == prod(placement.rows(row["pictures"], 2)), row
        assert rows * tokens == placement.row_tokens(row["pictures"], 2, T), row
    assert [Placement(world=4).sizes(pictures) for pictures in (1, 4, 5, 8)] == [{1}, {1}, {1, 2}, {2}]
    assert Placement(Layout(weights=4), 4).rows(3, 2) == (3, 2) and Placement(Layout(rows=2), 4).rows(3, 2) == (3, 1)


def test_collectives_and_bytes(results):
    """A layer costs what accel/parallel/exchanges.py says; the output is gathered once."""
    for row in (row for row in of_kind(results, "plain") if row["guided"]):
        layout = Layout(*row["layout"])
        s, share = layout.tokens, prod(Placement(layout, 4).rows(row["pictures"], 2))
        t = T // s
        collectives, received = (1, 2 * share * (T - t) * D * 4) if s > 1 else (0, 0)
        if s > 1 and layout.exchange == "ulysses":
            collectives, received = 2, 4 * share * t * D * (s - 1) // s * 4
        output = 4 * share * t * PATCH * (layout.ranks - 1)
        assert row["collectives"] == DEPTH * collectives + 1, row
        assert row["bytes"] == DEPTH * received + output, row


def test_accelerated_networks_are_read_in_parts(results):
    """Of every family and tier a rank reads and holds its part of all large weights, and all ranks sum to the whole."""
    rows = of_kind(results, "accelerated")
    assert {row["family"] for row in rows} == {"DiT", "SiT", "DiT_Llama"}
    for row in rows:
        bound = dict(fp32=1e-5, exact=1e-5, fp16=5e-3)[row["tier"]]
        assert row["size"] > 0.3 and row["error"] < bound, row
        # Position embedding, labels and the last layer are everywhere.
        assert all(0 < row[what] - 1 / row["ranks"] < 0.15 for what in ("held", "read")), row


def test_a_network_is_loaded_in_parts(results):
    rows = of_kind(results, "loaded")
    assert len(rows) == 3 and all(row["heads"] == 4 and row["tier"] == "fp16" for row in rows)
    assert all(row["size"] > 0.3 and row["error"] < 5e-3 for row in rows), rows


def test_large_dit(results):
    """Tokens know where they stand in the row, and the norm of queries and keys sees all heads."""
    rows = of_kind(results, "large, plain", "large, fast")
    assert len({(row["layout"], row["kind"], row["qk_norm"]) for row in rows}) == 4 * 2 * 2
    for row in rows:
        assert row["size"] > 0.3 and row["error"] < 1e-5, row
