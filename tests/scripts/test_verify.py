"""verify.py: every grid and tile is held to the gate, and only what passes is recommended."""

import json
import sys

import numpy as np
import pytest
import torch

import evaluate
from accel.options import UsageError
from accel.vae import to_grid
from scripts import verify


def grids(seeds=2, damage=0.0, only=None):
    """Grids of eight random pictures of 32 px; `damage` is added to all tiles of each or to tile `only` of the last seed."""
    out = {}
    for seed in range(seeds):
        pixels = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) * 1.6 - 0.8
        if only is None or seed == seeds - 1:
            pixels[slice(None) if only is None else only] += damage
        out[seed] = to_grid(pixels).numpy()
    return out


class Distance:
    """In LPIPS' place where its weights are not the subject: a distance that sees any damage."""

    def __call__(self, a, b):
        return float(np.abs(a.astype(int) - b).mean() / 255)


def test_one_bad_tile_fails_the_tier():
    want = grids()
    same = verify.judge(want, grids(), Distance())
    assert same["verdicts"] == dict(contest="PASS", strict="PASS") and len(same["parts"]) == 2 * 9
    bad = verify.judge(want, grids(damage=0.1, only=5), Distance())
    assert bad["verdicts"]["contest"] == "FAIL" and bad["worst_seed"] == 1
    assert [
        (row["seed"], row["part"])
        for row in bad["parts"]
        if row["verdict"]["contest"] == "FAIL" and row["part"] != "grid"
    ] == [(1, "2,2")]
    assert bad["worst"]["tile"]["psnr"] == min(row["psnr"] for row in bad["parts"])
    slight = verify.judge(
        want, grids(damage=0.004), Distance()
    )  # half a level: within the contest's bar, not within the strict one
    assert slight["verdicts"] == dict(contest="PASS", strict="FAIL")


def test_a_metric_that_cannot_be_computed_passes_nothing():
    class Missing:
        def __call__(self, a, b):
            raise evaluate.NotComputed("LPIPS: no weights")

    record = verify.judge(grids(1), grids(1, damage=0.004), Missing())
    assert record["verdicts"]["contest"] == "NONE" and record["reasons"] == ["LPIPS: no weights"]
    assert verify.recommend([dict(tier="fp16", seconds=dict(median=1), **record)], "contest") is None


def test_the_fastest_that_passes_is_recommended():
    def tier(name, seconds, contest, strict):
        return dict(tier=name, seconds=dict(median=seconds), verdicts=dict(contest=contest, strict=strict))

    tiers = [
        tier("bf16", 1, "FAIL", "FAIL"),
        tier("fp16", 2, "PASS", "FAIL"),
        tier("tf32", 4, "PASS", "PASS"),
        dict(tier="x", refused="overflows"),
    ]
    assert verify.recommend(tiers, "contest") == "fp16" and verify.recommend(tiers, "strict") == "tf32"
    assert verify.recommend(tiers[:1], "contest") is None


def test_tiers_that_the_device_lacks():
    assert verify.choose_tiers(None, torch.device("cpu"))
    assert verify.choose_tiers(["fp32"], torch.device("cpu")) == [verify.AGAIN] and verify.choose_tiers(
        ["fp32"], torch.device("cpu"), "plan"
    ) == ["fp32"]
    with pytest.raises(UsageError, match="--precision bf16"):
        verify.choose_tiers(["bf16"], torch.device("cpu"))


def test_on_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "verify.py",
            "--model",
            "DiT-Demo/2",
            "--device",
            "cpu",
            "--num-sampling-steps",
            "2",
            "--labels",
            "0",
            "3",
            "--seeds",
            "2",
            "--precision",
            "fp32",
            "--output",
            str(tmp_path / "out"),
        ],
    )
    with pytest.raises(SystemExit) as done:
        verify.main()
    text = capsys.readouterr().out
    assert done.value.code == 0 and "nothing but fp32" in text and "RECOMMENDED: --precision fp32" in text
    record = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert (
        [len(tier["parts"]) for tier in record["tiers"]] == [2 * 3]
        and record["recommended"] == "fp32 again"
        and record["gpu"] is None
    )
    assert {"seed0-fp32.png", "seed1-fp32.png", "seed1-fp32-again.png", "heatmap-fp32-again.png"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }


def test_a_plan_for_another_run_is_refused_before_the_reference_is_sampled(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "verify.py",
            "--model",
            "DiT-Demo/2",
            "--device",
            "cpu",
            "--num-sampling-steps",
            "20",
            "--forecast",
            "plan",
            "--output",
            str(tmp_path),
        ],
    )
    monkeypatch.setattr(verify, "sample", lambda *_: pytest.fail("sampled"))
    with pytest.raises(SystemExit) as done:
        verify.main()
    error = capsys.readouterr().err
    assert done.value.code == 2 and "was made for --num-sampling-steps 250, not 20" in error and error.count("\n") == 1


def test_forecasts_are_held_to_all_calls(tmp_path, monkeypatch, capsys):
    """The reference calls the network at every step, whatever is verified; fp32's forecasts are then another picture."""
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "verify.py",
            "--model",
            "DiT-Demo/2",
            "--device",
            "cpu",
            "--num-sampling-steps",
            "12",
            "--labels",
            "0",
            "--seeds",
            "1",
            "--forecast",
            "auto",
            "--forecast-tolerance",
            "1000",
            "--output",
            str(tmp_path),
        ],
    )
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "none"))
    with pytest.raises(SystemExit):
        verify.main()
    [tier] = json.loads((tmp_path / "verify.json").read_text())["tiers"]
    assert tier["tier"] == "fp32, forecast auto" and tier["worst"]["grid"]["mae"] > 0
    assert (tmp_path / "seed0-fp32.png").read_bytes() != (tmp_path / "seed0-fp32--forecast-auto.png").read_bytes() and (
        tmp_path / "heatmap-fp32--forecast-auto.png"
    ).is_file()
