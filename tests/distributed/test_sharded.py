"""One evaluation on a mesh of real processes over gloo: equal to one process."""

import json

import pytest
from jobs import run


@pytest.fixture(scope="module")
def results():
    """What every one of four ranks found, on meshes of two, three and four; the smaller
    leave some idle.
    """
    ranks = json.loads(run(4, script="tests/distributed/sharded_worker.py").splitlines()[0])
    assert len(ranks) == 4 and len(ranks[0]) > len(ranks[2]) > len(ranks[3])
    return [row for rank in ranks for row in rank]


def of_kind(results, *kinds):
    rows = [row for row in results if row["kind"] in kinds]
    assert rows
    return rows


def test_equal_to_one_process(results):
    rows = of_kind(results, "plain")
    assert {(1, 2), (1, 3), (1, 4), (3, 1), (2, 2)} <= {tuple(row["layout"]) for row in rows}
    for row in rows:
        assert row["size"] > 0.5 and row["error"] <= 1e-5, row


def test_large_dit(results):
    """Tokens know where they stand in the row, and the norm of queries and keys sees all heads."""
    rows = of_kind(results, "large, plain", "large, fast")
    assert len({(row["layout"], row["kind"]) for row in rows}) == 4 * 2
    for row in rows:
        assert row["size"] > 0.3 and row["error"] < 1e-5, row
