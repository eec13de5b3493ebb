"""Large-DiT on four real processes over gloo: batch rows, tokens by every exchange, and weights."""

import json

import pytest
from jobs import run


@pytest.fixture(scope="module")
def results():
    """What every rank found; layouts of fewer leave some idle."""
    ranks = json.loads(run(4, script="tests/distributed/large_dit_worker.py").splitlines()[0])
    assert len(ranks) == 4 and len(ranks[0]) > len(ranks[3]) > 0
    return [row for rank in ranks for row in rank]


def test_equal_to_one_process(results):
    """Tokens know where they stand in the row, and the norm of queries and keys sees all heads."""
    assert len({(row["layout"], row["kind"], row["qk_norm"]) for row in results}) == 9 * 2 * 2
    for row in results:
        assert row["size"] > 0.3 and row["error"] < 1e-5, row


@pytest.mark.parametrize("ranks", (2, 4))
def test_a_rank_holds_its_part_of_the_weights(results, ranks):
    rows = [row for row in results if row["layout"] == f"weights={ranks}"]
    assert {row["kind"] for row in rows} == {"plain", "fast"}
    for row in rows:
        assert row["part"] == pytest.approx(1 / ranks, rel=0.01), row


def test_the_others_hold_all(results):
    assert all(row["part"] == 1 for row in results if "weights" not in row["layout"])
