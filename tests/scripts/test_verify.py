"""verify.py: every grid and every picture in it has to meet the criterion, and only what
does is recommended.
"""

import json

import numpy as np
import pytest
import torch
from forks import succeeds
from networks import small

import evaluate
from accel.errors import UsageError
from accel.families import DEMO
from accel.families.dit.network import DiT
from accel.output import to_grid
from scripts import verify


def grids(seeds=2, damage=0.0, only=None):
    """Grids of eight random pictures of 32 px; `damage` is added to all tiles of each or
    to tile `only` of the last seed.
    """
    out = {}
    for seed in range(seeds):
        pixels = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) * 1.6 - 0.8
        if only is None or seed == seeds - 1:
            pixels[slice(None) if only is None else only] += damage
        out[seed] = to_grid(pixels).numpy()
    return out


def distance(a, b):
    """In LPIPS' place: a distance that sees any damage."""
    return float(np.abs(a.astype(int) - b).mean() / 255)


def test_one_bad_tile_fails_the_tier():
    want = grids()
    same = verify.judge(want, grids(), distance)
    assert same["verdicts"] == dict(contest="PASS", strict="PASS") and len(same["parts"]) == 2 * 9
    bad = verify.judge(want, grids(damage=0.1, only=5), distance)
    assert bad["verdicts"]["contest"] == "FAIL" and bad["worst_seed"] == 1
    failed = [
        (row["seed"], row["part"]) for row in bad["parts"] if row["verdict"]["contest"] == "FAIL"
    ]
    assert failed == [(1, "grid"), (1, "2,2")]
    assert bad["worst"]["tile"]["psnr"] == min(row["psnr"] for row in bad["parts"])
    slight = verify.judge(want, grids(damage=0.004), distance)  # half a level
    assert slight["verdicts"] == dict(contest="PASS", strict="FAIL")


def test_a_metric_that_cannot_be_computed_passes_nothing():
    def missing(a, b):
        raise evaluate.NotComputed("LPIPS: no weights")

    record = verify.judge(grids(1), grids(1, damage=0.004), missing)
    assert record["verdicts"]["contest"] == "NONE" and record["reasons"] == ["LPIPS: no weights"]
    assert (
        verify.recommend([dict(tier="fp16", seconds=dict(median=1), **record)], "contest") is None
    )
    failed = verify.judge(grids(1), grids(1, damage=0.1), missing)
    assert failed["verdicts"]["contest"] == "FAIL"  # whatever LPIPS would have said


def test_tiers_that_the_device_lacks():
    cpu = torch.device("cpu")
    assert verify.choose_tiers(None, cpu) == [verify.AGAIN]
    with pytest.raises(UsageError, match="precision=bf16: cpu has no bfloat16"):
        verify.choose_tiers(["bf16"], cpu)


VERIFY = "scripts/verify.py", "--model", "DiT-Demo/2", "--device", "cpu"


def test_on_a_cpu(tmp_path, here):
    flags = [
        "--num-sampling-steps",
        2,
        "--labels",
        0,
        3,
        "--seeds",
        2,
        "--precision",
        "fp32",
        "--output",
    ]
    text = succeeds(here(*VERIFY, *flags, tmp_path / "out"))
    assert "2 labels" in text and "2 seeds" in text and "cpu runs fp32 only" in text
    assert (
        "RECOMMENDED: --precision fp32 (the only tier here; its second run meets the contest "
        "criterion)" in text
    )
    record = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert [len(tier["parts"]) for tier in record["tiers"]] == [2 * 3]
    assert (
        record["recommended"] == "fp32 again"
        and record["gpu"] is None
        and record["commit"]
        and record["date"]
    )
    assert {
        "seed0-fp32.png",
        "seed1-fp32.png",
        "seed1-fp32-again.png",
        "heatmap-fp32-again.png",
    } == {path.name for path in (tmp_path / "out").iterdir()} - {
        "seed0-fp32-again.png",
        "verify.json",
    }


def test_the_record_names_the_guide(tmp_path, here):
    """Both runs are guided: the same weights and scale without it make another picture."""
    for seed, name in enumerate(("f", "g")):
        model = small(DiT, input_size=16, hidden_size=72 * (2 - seed))
        content = {"ema": model.state_dict(), "args": dict(num_heads=2)}
        torch.save(content, tmp_path / f"{name}.pt")
    flags = ["--ckpt", tmp_path / "f.pt", "--vae", DEMO / "vae", "--device", "cpu", "--labels", 1]
    flags += ["--num-sampling-steps", 2, "--cfg-scale", 1.7, "--output"]
    records = {}
    for name, guide in (("with", ["--guide", tmp_path / "g.pt"]), ("without", [])):
        text = succeeds(here("scripts/verify.py", *flags, tmp_path / name, *guide))
        records[name] = json.loads((tmp_path / name / "verify.json").read_text())
        assert ("autoguidance 1.7 by g.pt" in text) == bool(guide)
    assert (records["with"]["guide"], records["with"]["cfg_scale"]) == ("g.pt", 1.7)
    assert records["without"]["guide"] is None
    pictures = [(tmp_path / name / "seed0-fp32.png").read_bytes() for name in records]
    assert pictures[0] != pictures[1]


def test_what_is_recommended(capsys):
    """The fastest tier that passes is recommended."""

    def conclude(*tiers, gate="contest"):
        status = verify.conclude(dict(gate=gate, seeds=1, tiers=tiers))
        return status, capsys.readouterr().out

    def tier(name, speedup, contest, strict="FAIL"):
        verdicts = dict(contest=contest, strict=strict)
        return dict(tier=name, seconds=dict(median=1 / speedup), speedup=speedup, verdicts=verdicts)

    tiers = (
        tier("bf16", 5, "FAIL"),
        tier("fp16", 4, "PASS"),
        tier("tf32", 2, "PASS", "PASS"),
    )
    tiers += (dict(tier="x", refused="overflows"),)
    status, text = conclude(*tiers)
    assert status == 0
    assert "--precision fp16 (4.00 times fp32's speed; all grids and pictures of 1 seed " in text
    assert "--precision tf32 (2.00 times" in conclude(*tiers, gate="strict")[1]
    assert conclude(tiers[0])[0] == conclude(tiers[-1])[0] == 1
    assert conclude(tiers[0], tier("fp16", 4, "NONE"))[0] == 3


def test_of_several_pictures_that_fail_the_worst_is_shown():
    """By its PSNR, which JSON may have made a string."""
    rows = [
        ("grid", 1, 38.0),
        ("1,1", 1, 39.0),
        ("1,2", 1, 9.5),
        ("2,1", 1, "31.0"),
        ("2,2", 1, "inf"),
    ]
    parts = [
        dict(
            part=part,
            seed=seed,
            psnr=psnr,
            verdict={"contest": "PASS" if psnr == "inf" else "FAIL"},
        )
        for part, seed, psnr in rows
    ]
    found = verify.shown(dict(parts=parts, worst_seed=1), "contest")
    assert {suffix: row["part"] for suffix, row in found.items()} == {"": "grid", "-picture": "1,2"}


def test_the_help_says_what_is_verified(here):
    text = " ".join(succeeds(here(*VERIFY, "--help")).split())
    assert "Every precision tier against fp32, and which tier to take." in text
