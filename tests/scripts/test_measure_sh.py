"""The script that runs all measurements."""

import os
import subprocess

import pytest
from conftest import ROOT
from forks import refused, succeeds

SCRIPT = ROOT / "scripts" / "measure.sh"
FILES = ["contest-1", "contest-2", "ladder", "layouts", "label-1", "label-2"]
FLAGS = "--num-sampling-steps", "20", "--gpus", "2"


@pytest.fixture
def folder(tmp_path):
    """A folder with all measurements of two processes on a CPU."""
    for name in FILES:
        (tmp_path / f"{name}.json").write_text("{}")
    (tmp_path / "contest-2-fp32.png").touch()
    command = f"bash scripts/measure.sh {tmp_path} {' '.join(FLAGS)}"
    (tmp_path / "asked.txt").write_text(f"{command}\nup to 2 × CPU\n")
    return tmp_path


def measure(*arguments):
    """Run it where no GPU is seen."""
    return subprocess.run(
        ["bash", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | dict(CUDA_VISIBLE_DEVICES=""),
    )


def test_a_whole_file_is_not_measured_again(folder):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    text = succeeds(measure(folder, *FLAGS))
    assert all(f"{name}.json is there" in text for name in FILES)
    assert f"report.py output/report --team TEAM --log {folder} --picture PICTURE" in text
    assert f"hand in: {folder}/contest-2-fp32.png" in text
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_file_that_was_cut_short_is_measured_again(folder):
    """The command is what fails here: it gets a model that there is not."""
    (folder / "asked.txt").unlink()
    (folder / "ladder.json.unfinished").touch()
    done = measure(folder, "--model", "DiT-None/2")
    assert done.returncode == 2 and "measure.py: --model DiT-None/2: unknown" in done.stderr
    assert "contest-2.json is there" in done.stdout
    assert (
        "== python bench/measure.py ladder --model DiT-Demo/2 --device cpu --model DiT-None/2 --profile"
        in done.stdout
    )
    assert (folder / "ladder.json.unfinished").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ("--num-sampling-steps", "250", "--gpus", "2"),
        (*FLAGS, "--ckpt", "XL.pt"),
        ("--num-sampling-steps", "20", "--gpus", "4"),
    ],
)
def test_a_folder_of_another_run_is_refused(folder, flags):
    line = refused(measure(folder, *flags))
    assert line.startswith(f"measure.sh: {folder} is of another run (bash scripts/measure.sh")
    assert f"measure.sh {folder} {' '.join(flags)}, up to" in line
    assert "name another folder" in line


def test_a_folder_of_another_machine_is_refused(folder):
    text = (folder / "asked.txt").read_text()
    (folder / "asked.txt").write_text(text.replace("CPU", "NVIDIA V100"))
    line = refused(measure(folder, *FLAGS))
    assert "up to 2 × NVIDIA V100), this is " in line and "up to 2 × CPU; name another" in line


@pytest.mark.parametrize(
    "flags, words",
    [
        ((), "name the folder for the measurements"),
        (
            ("x", "--vgg-weights", "y"),
            "--vgg-weights: no such flag; bash scripts/measure.sh --help",
        ),
        (("x", "--ckpt"), "--ckpt: give a value"),
        (("x", "--fork", "docs"), "--fork docs: has no sample.py; name the organisers' checkout"),
        (("/dev/null",), "/dev/null: no folder can be made or written there; name another"),
        (("/proc/nowhere",), "/proc/nowhere: no folder can be made or written there"),
        (("/proc",), "/proc: no folder can be made or written there"),
    ],
)
def test_what_is_refused(flags, words):
    assert words in refused(measure(*flags))


def test_help():
    text = succeeds(measure("--help"))
    assert "bash scripts/measure.sh FOLDER" in text and "set -" not in text
