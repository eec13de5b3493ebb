"""verify.py: tiers are judged picture by picture, and a tier that fails is not recommended."""

import json
import math

import pytest
from forks import refused, succeeds
from PIL import Image

import evaluate
from scripts import verify

VERIFY = "scripts/verify.py", "--model", "DiT-Demo/2", "--device", "cpu"
SHORT = "--num-sampling-steps", 2, "--labels", 0, 3, "--seeds", 2, "--output"


def test_pictures_and_record(tmp_path, here):
    """A CPU has no tier but fp32, which is then compared with itself."""
    for name, more in (("plain", []), ("unguided", ["--cfg-scale", 1])):
        text = succeeds(here(*VERIFY, *SHORT, tmp_path / name, *more))
        assert text.splitlines()[-1] == "RECOMMENDED: --precision fp32"
    record = json.loads((tmp_path / "plain" / "verify.json").read_text())
    assert record["recommended"] == "fp32" and record["gate"] == "close" and record["commit"]
    report = record["tiers"]["fp32"]
    assert report["verdict"] == "PASS" and report["worst"]["psnr"] == "inf"
    names = [f"seed{seed}-{index}.png" for seed in (0, 1) for index in (0, 1)]
    for key, folder in (("file", "fp32"), ("baseline", "reference")):
        assert [one[key] for one in report["files"]] == [
            str(tmp_path / "plain" / folder / name) for name in names
        ]
    files = [tmp_path / name / "fp32" / "seed0-0.png" for name in ("plain", "unguided")]
    pictures = [Image.open(file).tobytes() for file in (*files, files[0].with_name(names[2]))]
    assert len({*pictures}) == 3  # guidance and the seed count
    assert (tmp_path / "plain" / "heatmap-fp32.png").exists()


def test_a_tier_that_fails_is_not_recommended(tmp_path, monkeypatch):
    """Here the criterion is one that equal pictures miss: PSNR must be above infinity."""
    monkeypatch.setitem(evaluate.GATES, "close", {"mae": 0.01, "psnr": math.inf})
    words = [*VERIFY, *SHORT, tmp_path, "--seeds", 1, "--precision", "fp32"]
    monkeypatch.setattr("sys.argv", list(map(str, words)))
    with pytest.raises(SystemExit, match="^1$"):
        verify.main()
    record = json.loads((tmp_path / "verify.json").read_text())
    assert record["tiers"]["fp32"]["verdict"] == "FAIL"


def test_a_tier_that_the_device_lacks(tmp_path, here):
    done = here(*VERIFY, "--precision", "bf16", "--output", tmp_path / "out")
    assert "--precision bf16" in refused(done) and not (tmp_path / "out").exists()
