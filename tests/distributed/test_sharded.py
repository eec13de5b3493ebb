"""One forward on a mesh of real processes over gloo: equal to one process, and no byte more between them than arithmetic says."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from accel.parallel.tokens import traffic

T, D, DEPTH, PATCH = 36, 96, 3, 32  # of sharded_worker.py; the last: numbers that the output has a token, p·p·2C


@pytest.fixture(scope="module")
def results():
    """What every one of four ranks found, on meshes of two, three and four; the smaller leave some idle."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=4",
            str(ROOT / "tests" / "distributed" / "sharded_worker.py"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))},
    )
    assert done.returncode == 0, done.stderr
    ranks = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[[")))
    assert len(ranks) == 4 and len(ranks[0]) > len(ranks[2]) > len(ranks[3])
    return [row for rank in ranks for row in rank]


def test_equal_to_one_process(results):
    seen = {(row["rows"], row["tokens"], row["exchange"], row["kind"]) for row in results}
    assert {
        (1, tokens, name, kind)
        for tokens in (2, 3, 4)
        for name in ("kv", "ulysses", "ring")
        for kind in ("fast", "plain")
    } <= seen
    assert {(1, 3, "ulysses", "exact"), (3, 1, "kv", "fast"), (2, 2, "ring", "fast"), (4, 1, "kv", "exact")} <= seen
    assert "weights" in {row["kind"] for row in results}
    for row in results:
        assert row["size"] > 0.5 and (row["error"] <= 1e-5 or row["kind"] == "stages"), row


def test_collectives_and_bytes(results):
    """A layer costs what accel/parallel/tokens.py says; the output is gathered once."""
    for row in results:
        if row["kind"] != "fast":
            continue
        s, share = row["tokens"], -(-2 * row["pictures"] // row["rows"])
        t = T // s
        calls, received = traffic(row["exchange"], share, t, s, D, 4) if s > 1 else (0, 0)
        assert (
            received == {"ulysses": 4 * share * t * D * (s - 1) // s}.get(row["exchange"], 2 * share * (T - t) * D) * 4
        )
        output = 4 * share * t * PATCH * (row["rows"] * s - 1)
        assert row["collectives"] == DEPTH * calls + 1, row  # the ring's sends are no collectives
        assert row["bytes"] == DEPTH * received + output, row


def test_weights_divided(results):
    """Each rank holds its part of the blocks' weights and little more; a block sums twice and gathers its conditioning."""
    for row in results:
        if row["kind"] == "weights":
            assert 1 / 4 < row["weights"] < 1 / 4 + 0.01  # biases of row-wise products are everywhere
            assert row["calls"] == dict(all_reduce=2 * DEPTH, all_gather_into_tensor=DEPTH), row


def test_stages(results):
    """Exactly one process's latents where every step is a warm-up; near them, and not the same, where old keys and values were used."""
    errors = {}
    for row in results:
        if row["kind"] == "stages":
            errors.setdefault((row["exchange"], row["warmup"]), []).append(row["error"])
    assert len(errors) == 6
    for (_, warmup), found in errors.items():
        assert len(found) == DEPTH and len(set(found)) == 1  # the same on every rank
        assert found[0] == 0 if warmup == 6 else 1e-6 < found[0] < 0.5, errors
    assert errors["fast", 2] < errors["fast", 0]
