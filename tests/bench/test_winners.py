"""known.json keeps its form when winners are recorded. The measurement needs a GPU."""

import json

import pytest

from bench import winners


def test_winners_are_merged(tmp_path):
    """What is there stays, byte for byte; a shape measured again is replaced, another GPU is added."""
    before, copy = winners.KNOWN.read_text(), tmp_path / "known.json"
    known = json.loads(before)
    copy.write_text(before)
    gemms = [dict(m=512, n=1152, k=4608, gelu=False, winner=known["NVIDIA H200"]["512x1152x4608"])]
    winners.record_winners("NVIDIA H200", gemms, copy)
    assert copy.read_text() == before
    gemms += [dict(m=8, n=16, k=8, gelu=True, winner=[1, 2, 3, 4])]
    winners.record_winners("NVIDIA H100", gemms, copy)
    known = json.loads(copy.read_text())
    assert known["NVIDIA H200"] == json.loads(before)["NVIDIA H200"]
    assert known["NVIDIA H100"] == {"512x1152x4608": gemms[0]["winner"], "8x16x8 gelu": gemms[1]["winner"]}


@pytest.mark.gpu
def test_a_winner_is_found_again():
    record = winners.winner(256, 216, 72, False, 0.1)
    assert record["winner"] in [row["algorithm"] for row in record["candidates"]] and len(record["candidates"]) > 1
