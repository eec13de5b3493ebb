"""The script that runs all measurements."""

import json
import subprocess

import pytest
from conftest import ROOT
from forks import refused, succeeds

SCRIPT = ROOT / "scripts" / "measure.sh"
FILES = [
    "profile-baseline",
    "profile-fast",
    "ladder",
    "versus",
    "contest",
    "verify/verify",
    "parallel",
    "contest-gpus",
]


RECORD = dict(gpu=None, model="DiT-Demo/2", image_size=128, weights="dit.safetensors")


@pytest.fixture
def folder(tmp_path):
    """A folder with all measurements of the demo on a CPU."""
    (tmp_path / "verify").mkdir()
    for name in FILES:
        kind = name.partition("-")[0].partition("/")[0]
        write(tmp_path / f"{name}.json", kind=dict(ladder="steps", versus="steps").get(kind, kind))
    write(tmp_path / "contest-gpus.json", kind="contest", gpus=2, decoder="vae")
    return tmp_path


def write(path, **entries):
    path.write_text(json.dumps(RECORD | entries))


def measure(*arguments):
    return subprocess.run(["bash", SCRIPT, *arguments], capture_output=True, text=True)


def test_a_whole_file_is_not_measured_again(folder):
    before = {path: path.read_bytes() for path in folder.rglob("*.json")}
    text = succeeds(measure(folder))
    assert (
        "ladder.json is there" in text
        and f"report.py output/report --team TEAM --log {folder}" in text
    )
    assert {path: path.read_bytes() for path in folder.rglob("*.json")} == before
    assert len(before) == len(FILES)


@pytest.mark.parametrize(
    "file, entries, words",
    [
        ("ladder", dict(kind="steps", weights="XL.pt"), "weights XL.pt, and this run of dit."),
        ("contest", dict(kind="contest", model="DiT-XL/2"), "model DiT-XL/2, and this run of"),
        ("contest", dict(kind="contest", decoder="ema"), "decoder ema, and this run of vae"),
        ("contest", dict(kind="contest", steps=20), "steps 20, and this run of 250"),
        ("parallel", dict(kind="parallel", gpu="NVIDIA V100"), "gpu NVIDIA V100, and this run of"),
        ("contest-gpus", dict(kind="contest", gpus=4), "gpus 4, and this run of 2"),
    ],
)
def test_a_folder_of_another_machine_or_network_is_refused(folder, file, entries, words):
    write(folder / f"{file}.json", **entries)
    line = refused(measure(folder))
    assert line.startswith(f"measure.sh: {folder / file}.json is of {words}")
    assert "name another folder" in line


def test_vgg16_is_looked_for_first(tmp_path):
    line = refused(measure(tmp_path, "--vgg-weights", "none.pth"))
    assert line == "measure.sh: --vgg-weights none.pth: no such file\n"


def test_it_names_its_folder():
    cases = [(["--help"], 0, "bash scripts/measure.sh FOLDER"), ([], 2, "name the folder")]
    for place in "/dev/null", "/proc/nowhere", "/proc":
        cases.append(
            (
                [place],
                2,
                f"measure.sh: {place}: no folder can be made or written there; name another\n",
            )
        )
    for arguments, status, words in cases:
        done = subprocess.run(["bash", SCRIPT, *arguments], capture_output=True, text=True)
        assert (
            done.returncode == status
            and words in done.stdout + done.stderr
            and "set -" not in done.stdout
        )
        assert done.stderr.count("\n") == status // 2
