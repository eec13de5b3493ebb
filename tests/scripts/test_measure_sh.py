"""The script that runs all measurements."""

import fcntl
import os
import shutil
import subprocess

import pytest
from conftest import ROOT
from forks import refused, succeeds

SCRIPT = ROOT / "scripts" / "measure.sh"
FILES = ["contest-1", "contest-2", "ladder", "layouts", "label-1", "label-2"]
FLAGS = "--num-sampling-steps", "20", "--gpus", "2"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder with all measurements of two processes on a CPU."""
    folder = tmp_path_factory.mktemp("log")
    for name in FILES:
        (folder / f"{name}.json").write_text('{"tier": "fp32"}')
    (folder / "contest-2-fp32.png").touch()
    succeeds(measure(folder, *FLAGS))
    return folder


@pytest.fixture
def folder(measured, tmp_path):
    return shutil.copytree(measured, tmp_path / "log")


def measure(*arguments):
    """Run it where no GPU is seen."""
    return subprocess.run(
        ["bash", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | dict(CUDA_VISIBLE_DEVICES=""),
    )


@pytest.mark.parametrize(
    "flags, has_vgg16",
    [
        (("--gpus", "2", "--precision", "fp32", "--num-sampling-steps", "20/"), False),
        ((*FLAGS, "--repeats", "2", "--load", "1"), True),
    ],
)
def test_a_whole_file_is_not_measured_again(flags, has_vgg16, folder, tmp_path, monkeypatch):
    """Reordered options, more tiers and more repeats continue the run. A missing VGG16 is reported
    first.
    """
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    weights = tmp_path / "hub/checkpoints/vgg16-397923af.pth"
    weights.parent.mkdir(parents=True)
    if has_vgg16:
        weights.touch()
    text = succeeds(measure(f"{folder}/", *flags))
    line = f"{weights} is not there; report.py will need it"
    assert (line in text.splitlines()[0]) != has_vgg16
    assert all(f"{name}.json is there" in text for name in FILES)
    assert f"hand in: {folder}/contest-2-fp32.png" in text.replace("//", "/")
    names = (folder / "asked.txt").read_text().splitlines()[3:]
    assert names == sorted(f"{name}.json" for name in FILES)


def test_a_file_that_was_cut_short_or_lacks_a_tier_is_measured_again(folder):
    """The command is what fails here: a CPU has no fp16. The tiers before stay."""
    (folder / "ladder.json.unfinished").touch()
    assert "== python bench/measure.py ladder" in measure(folder, *FLAGS, "--load", "x").stdout
    done = measure(folder, *FLAGS, "--precision", "fp16")
    assert done.returncode == 2 and "--precision fp16: cpu has no " in done.stderr
    assert "== python bench/measure.py jobs --model DiT-Demo/2 --device cpu" in done.stdout
    assert (folder / "contest-1.json.unfinished").exists()


def test_a_typo_leaves_the_folder_free(tmp_path):
    line = measure(tmp_path, "--model", "DiT-None/2").stderr.splitlines()[-1]
    assert line.startswith("measure.py: --model DiT-None/2: unknown")
    assert (tmp_path / "asked.txt").read_text() == ""


@pytest.mark.parametrize(
    "flags",
    [
        (*FLAGS, "--ckpt", "XL.pt"),
        ("--num-sampling-steps", "20", "--gpus", "4"),
    ],
)
def test_a_folder_of_another_run_is_refused(folder, flags):
    line = refused(measure(folder, *flags))
    assert line.startswith(f"measure.sh: {folder} is of another run (up to 2 × CPU --num-sampling")
    assert f"this is up to {flags[-1] if flags[-1] == '4' else 2} × CPU" in line


def test_two_runs_in_a_folder(folder):
    with (folder / "asked.txt").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        line = refused(measure(folder, *FLAGS))
    assert line == f"measure.sh: {folder}: another measure.sh is at work there; wait for its end\n"


def test_a_fork_is_checked_first(folder, tmp_path):
    """Its decoder and the packages that it imports, before anything is measured."""
    fork = tmp_path / "fork"
    fork.mkdir()
    (fork / "sample.py").touch()
    assert "has no decoder; put its two files into" in refused(measure(folder, "--fork", fork))
    (fork / "pretrained_models/sd-vae-ft-ema").mkdir(parents=True)
    (fork / "pretrained_models/sd-vae-ft-ema/config.json").touch()
    line = measure(folder, "--fork", fork).stderr.splitlines()[-1]
    assert "this Python lacks a package that it imports; the error is above" in line


@pytest.mark.parametrize(
    "flags, words",
    [
        ((), "name the folder for the measurements"),
        (
            ("x", "--vgg-weights", "y"),
            "--vgg-weights: no such flag; bash scripts/measure.sh --help",
        ),
        (("x", "--ckpt"), "--ckpt: give a value"),
        (("x", "--fork", "docs"), "docs: has no sample.py; name the organisers' checkout"),
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
