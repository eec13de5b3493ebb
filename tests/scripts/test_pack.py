"""pack.sh: the contest's hand-in holds the work, the team's own logs, the result and its
settings, and no weights.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import ROOT
from forks import refused, succeeds

from bench.harness import RANDOM
from bench.jobs import CONTEST

CODE = "bench/steps.py", "models.py"
DEMO = "log/cpu.json", "pretrained_models/download.py", "pretrained_models/demo/dit.safetensors"
TRACKED = *CODE, *DEMO, "pretrained_models/large.pt"
PROGRAMS = ".gitignore", "scripts/handin.py", "scripts/pack.sh"
LOGS = "log/mine/fast.trace.json.gz", "log/mine/model.pt", "log/baseline-1.out", "output/four-2.out"
RECORD = dict(
    CONTEST,
    kind="contest",
    weights="XL.pt",
    decoder="ema",
    commit="abc1234",
    gpu="NVIDIA V100",
    driver="550.54",
    torch="2.10.0",
    gpus=4,
    command="python bench/jobs.py --contest fp32 fp16 --gpus 4",
)


@pytest.fixture
def checkout(tmp_path):
    """A git checkout with a picture, its measurement in log/mine and much that does not
    belong into a hand-in.
    """
    for name in (*TRACKED, *LOGS, ".venv/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "scripts").mkdir()
    for name in PROGRAMS:
        shutil.copy(ROOT / name, tmp_path / name)
    for words in (["init", "-q"], ["add", "--force", *PROGRAMS, *TRACKED]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    shutil.copy(ROOT / "docs" / "heatmap.png", tmp_path / "sample.png")
    measure(tmp_path / "log/mine/contest.json", tmp_path / "sample.png")
    return tmp_path


def measure(path, picture, **fields):
    """Write a record whose tier fp16 made `picture`."""
    digests = {"fp32": "0", "fp16": hashlib.sha256(picture.read_bytes()).hexdigest()}
    rows = [
        dict(
            tier=tier,
            seconds=10.0,
            picture=digest,
            settings=f"8 labels · {tier}",
            command=f"python sample.py --gpus 4 --precision {tier}",
            file=f"{path.stem}-{tier}.png",
        )
        for tier, digest in digests.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(RECORD | dict(contest=rows) | fields))


def pack(checkout, *args, binaries=Path(sys.executable).parent):
    """Run pack.sh where the programs in `binaries` come first and no environment is active."""
    env = dict(os.environ, PATH=f"{binaries}:{os.environ['PATH']}")
    env.pop("VIRTUAL_ENV", None)
    env.pop("CONDA_PREFIX", None)
    command = ["bash", "scripts/pack.sh", *args]
    return subprocess.run(command, cwd=checkout, env=env, text=True, capture_output=True)


def contents(checkout, name="Us_DiT"):
    """File → bytes of an archive."""
    with tarfile.open(checkout / f"{name}.tar.gz") as archive:
        files = [member for member in archive.getmembers() if member.isfile()]
        return {
            member.name.removeprefix(f"{name}/"): archive.extractfile(member).read()
            for member in files
        }


def test_what_is_packed(checkout):
    """What git tracks but large weights, what is named, Slurm's outputs, the environment, and the
    result with the tier that made it.
    """
    for _ in range(2):  # a second archive does not hold the first
        done = pack(checkout, "Us")  # sample.png and log/mine
        assert "Precision tier: fp16" in succeeds(done)
    packed = contents(checkout)
    added = {"log/mine/contest.json", "log/final_result.png", "log/FINAL_RESULT.txt"}
    slurm = {"log/baseline-1.out", "output/four-2.out"}
    assert set(packed) == {*CODE, *DEMO, *PROGRAMS, "environment.txt"} | added | slurm
    assert packed["log/final_result.png"] == (checkout / "sample.png").read_bytes()
    text = packed["log/FINAL_RESULT.txt"].decode()
    assert text.startswith("Final result")
    for line in (
        "Settings: 8 labels · fp16, weights XL.pt, commit abc1234",
        "Command: python sample.py --gpus 4 --precision fp16",
        "T: 10.00 s on 4 × NVIDIA V100",
    ):
        assert f"{line}\n" in text
    text = packed["environment.txt"].decode()
    assert f"\ntorch=={version('torch')}\n" in text and "Python 3." in text
    measured = "log/mine/contest.json: 4 × NVIDIA V100, driver 550.54, torch 2.10.0, commit abc1234"
    assert measured in text and f"\n    {RECORD['command']}\n" in text


def test_an_environment_without_torch_is_a_line(checkout, tmp_path):
    """The checkout's own .venv comes first where no environment is active."""
    shutil.rmtree(checkout / ".venv")
    venv.create(checkout / ".venv")
    done = pack(checkout, "Us")
    assert "Precision tier: fp16" in succeeds(done)
    assert f"{checkout}/.venv/bin/python3 has no torch" in done.stderr
    assert b"torch==" not in contents(checkout)["environment.txt"]


def test_the_picture_of_the_batch_files_is_the_default(checkout):
    """The newest of a job with a record, which goes in."""
    for job, second in ((1, 100), (2, 300), (3, 200)):
        folder = checkout / f"output/job_{job}"
        folder.mkdir(parents=True)
        picture = folder / "contest-fp16.png"
        picture.write_bytes(b"picture %d" % job)
        measure(folder / "contest.json", picture, gpus=job)
        os.utime(picture, (second, second))
    assert "from output/job_2/contest-fp16.png" in succeeds(pack(checkout, "Us"))
    packed = contents(checkout)
    assert packed["log/final_result.png"] == b"picture 2"
    assert {"output/job_2/contest.json", "log/mine/contest.json"} <= set(packed)
    assert "T: 10.00 s on 2 × NVIDIA V100" in packed["log/FINAL_RESULT.txt"].decode()


def test_of_two_measurements_the_one_beside_the_picture_counts(checkout):
    """On a CPU ranks make one picture."""
    shutil.copy(checkout / "sample.png", checkout / "log/mine/z-fp16.png")
    measure(checkout / "log/z/z.json", checkout / "sample.png", gpus=1, gpu=None)
    shutil.copy(checkout / "sample.png", checkout / "log/z/z-fp16.png")
    text = succeeds(pack(checkout, "Us", "log/z/z-fp16.png", "log/mine", "log/z"))
    assert "T: 10.00 s on 1 process on the CPU" in text and "Measured in: log/z/z.json" in text


@pytest.mark.parametrize("flag", ["--with", "--without"])
def test_files_that_git_does_not_track_need_a_word(flag, checkout):
    for name in ("mine.py", "accel/new.py", "weights.pt", "log/mine/notes.txt"):
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text("{}")
    line = "git does not track these files: accel/new.py mine.py; give --with to pack them too"
    assert line in refused(pack(checkout, "Us"))
    assert not list(checkout.glob("*.gz"))
    succeeds(pack(checkout, "Us", flag))
    packed = set(contents(checkout))
    assert ({"mine.py", "accel/new.py"} <= packed) == (flag == "--with")
    assert "log/mine/notes.txt" in packed and "weights.pt" not in packed


def test_a_tracked_file_that_is_gone_is_a_line(checkout):
    (checkout / "models.py").unlink()
    line = "git tracks files that are gone: models.py; bring them back"
    assert line in refused(pack(checkout, "Us")) and not list(checkout.glob("*.gz"))


def test_git_ignores_the_archives(checkout):
    names = "Us_DiT.tar.gz", "Us_DiT_rehearsal.tar.gz"
    done = subprocess.run(
        ["git", "check-ignore", *names], cwd=checkout, text=True, capture_output=True
    )
    assert done.stdout.split() == [*names]


@pytest.mark.parametrize(
    "key, value",
    [
        ("model", "DiT-Demo/2"),
        ("image_size", 256),
        ("steps", 25),
        ("pictures", 1),
        ("weights", RANDOM),
        ("decoder", RANDOM),
    ],
)
def test_another_job_is_marked(checkout, key, value):
    path = checkout / "log" / "mine" / "contest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    done = pack(checkout, "Us", "sample.png", "log/mine")
    assert (
        done.returncode == 0
        and "REHEARSAL, which earns no points" in done.stdout
        and str(value).partition(",")[0] in done.stdout
    )
    assert [path.name for path in checkout.glob("*.gz")] == ["Us_DiT_rehearsal.tar.gz"]
    with tarfile.open(checkout / "Us_DiT_rehearsal.tar.gz") as archive:
        text = archive.extractfile("Us_DiT_rehearsal/log/FINAL_RESULT.txt").read().decode()
    assert text.startswith("REHEARSAL")


def test_help(checkout):
    done = pack(checkout, "--help")
    assert (
        done.returncode == 0
        and "bash scripts/pack.sh TEAM [PICTURE [FILE...]] [--with|--without]" in done.stdout
        and "set -" not in done.stdout
    )
    assert not list(checkout.glob("*.gz"))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["a b"], "name the team"),
        (["--team"], "--team: no such flag; bash scripts/pack.sh --help"),
        (["../up"], "name the team"),
        (["Us", "other.png"], "other.png: no such picture"),
        (
            ["Us", "sample.png", "log/cpu.json"],
            "sample.png: is not the picture of a contest measurement in log/cpu",
        ),
        (["Us", "sample.png", "log/yours"], "log/yours: no such file or folder"),
        (["Us", "sample.png", "/etc/hostname"], "/etc/hostname: lies outside the repository"),
    ],
)
def test_what_is_refused(checkout, arguments, words):
    assert words in refused(pack(checkout, *arguments))
    assert not list(checkout.glob("*.gz"))


def test_a_refusal_names_the_pictures_that_can_be_packed(checkout):
    path = checkout / "sample.png"
    shutil.copy(path, checkout / "log/mine/contest-fp16.png")
    path.write_bytes(path.read_bytes() + b" ")
    line = refused(pack(checkout, "Us"))
    assert line.endswith("; name one that is: log/mine/contest-fp16.png\n")
    succeeds(pack(checkout, "Us", "log/mine/contest-fp16.png"))


def test_the_pictures_of_jobs_are_named_and_no_outputs_of_slurm(checkout):
    """Also those in log/mine/final, where the page puts them."""
    for name in ("output/job_7/contest", "log/mine/final/contest"):
        picture = checkout / f"{name}-fp16.png"
        picture.parent.mkdir(parents=True)
        picture.write_bytes(name.encode())
        measure(checkout / f"{name}.json", picture)
    line = refused(pack(checkout, "Us", "docs.png"))
    assert "docs.png: no such picture" in line
    shutil.copy(ROOT / "docs" / "page.png", checkout / "docs.png")
    line = refused(pack(checkout, "Us", "docs.png", "--without"))
    assert line.endswith("output/job_7/contest-fp16.png log/mine/final/contest-fp16.png\n")
    assert ".out" not in line
    os.utime(checkout / "output/job_7/contest-fp16.png", (100, 100))
    text = succeeds(pack(checkout, "Us", "--without"))
    assert "from log/mine/final/contest-fp16.png" in text


def test_a_measurement_that_is_not_finished_is_not_packed(checkout):
    (checkout / "log/mine/ladder.json.unfinished").touch()
    line = refused(pack(checkout, "Us"))
    assert "log/mine/ladder.json: is not finished: wait, or if nothing runs, give the same" in line
    assert not list(checkout.glob("*.gz"))


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe",
        b'{"contest": 5}',
        b"[" * 100_000,
        b'{"contest": [5]}',
        b'{"contest": [{"picture": "DIGEST"}]}',
    ],
)
def test_a_damaged_measurement_is_named(checkout, content):
    digest = hashlib.sha256((checkout / "sample.png").read_bytes()).hexdigest()
    (checkout / "log" / "mine" / "contest.json").write_bytes(
        content.replace(b"DIGEST", digest.encode())
    )
    line = r"pack.sh: 'log/mine/contest.json': is damaged \(\w+Error\); measure again"
    assert re.match(line, refused(pack(checkout, "Us"))) and not list(checkout.glob("*.gz"))


def test_what_a_measurement_says_is_shown_printable(checkout):
    path = checkout / "log" / "mine" / "contest.json"
    path.write_text(path.read_text().replace('"fp16"', r'"fp16\u001b[2J\nfp32 größe"'))
    done = pack(checkout, "Us")
    assert done.returncode == 0 and "\x1b" not in done.stdout
    assert r"Precision tier: fp16\x1b[2J\nfp32 größe" in done.stdout


def test_without_git(checkout):
    shutil.rmtree(checkout / ".git")
    assert "git init" in pack(checkout, "Us", "sample.png", "log/mine").stderr
