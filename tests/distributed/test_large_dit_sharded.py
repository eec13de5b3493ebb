"""Large-DiT on four real processes over gloo: batch rows, tokens by every exchange, and weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

WORKER = Path(__file__).with_name("large_dit_worker.py")


@pytest.fixture(scope="module")
def results():
    """What every rank found; layouts of fewer leave some idle."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4", str(WORKER)]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr
    ranks = json.loads(done.stdout.splitlines()[-1])
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
