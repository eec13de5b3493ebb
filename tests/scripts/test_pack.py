"""pack.sh: the contest's hand-in holds the work, the team's own logs, the result and its
settings, and no weights.
"""

import hashlib
import json
import re
import shutil
import subprocess
import tarfile

import pytest
from conftest import ROOT
from forks import refused, succeeds

from bench.jobs import CONTEST

TRACKED = "bench/steps.py", "log/cpu.json", "models.py", "pretrained_models/demo/dit.safetensors"
STRAYS = (
    ".venv/bin/python",
    "log/job-1.out",
    "log/mine/fast.trace.json.gz",
    "log/mine/model.pt",
    "notes.txt",
)


@pytest.fixture
def checkout(tmp_path):
    """A git checkout with a picture, its measurement in log/mine and much that does not
    belong into a hand-in.
    """
    for name in (*TRACKED, *STRAYS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "pack.sh", tmp_path / "scripts")
    for words in (["init", "-q"], ["add", "scripts/pack.sh", *TRACKED]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    shutil.copy(ROOT / "docs" / "heatmap.png", tmp_path / "sample.png")
    digest = hashlib.sha256((tmp_path / "sample.png").read_bytes()).hexdigest()
    pictures = {"fp32": "0", "fp16": digest}
    rows = [
        dict(tier=tier, seconds=10.0, picture=pictures[tier], settings=f"8 labels · {tier}")
        for tier in pictures
    ]
    record = dict(CONTEST, kind="contest", contest=rows, weights="XL.pt", commit="abc1234")
    (tmp_path / "log" / "mine" / "contest.json").write_text(json.dumps(record))
    return tmp_path


def pack(checkout, *args):
    return subprocess.run(
        ["bash", "scripts/pack.sh", *args], cwd=checkout, text=True, capture_output=True
    )


def test_what_is_packed(checkout):
    """What git tracks but weights, what is named, and the result with the tier that made it."""
    for _ in range(2):  # a second archive does not hold the first
        done = pack(checkout, "Us")  # sample.png and log/mine
        assert "Precision tier: fp16" in succeeds(done)
    with tarfile.open(checkout / "Us_DiT.tar.gz") as archive:
        names = {
            member.name.removeprefix("Us_DiT/")
            for member in archive.getmembers()
            if member.isfile()
        }
        result = archive.extractfile("Us_DiT/log/final_result.png").read()
        text = archive.extractfile("Us_DiT/log/FINAL_RESULT.txt").read().decode()
    added = {"log/mine/contest.json", "log/final_result.png", "log/FINAL_RESULT.txt"}
    assert names == {"bench/steps.py", "models.py", "scripts/pack.sh"} | added
    assert result == (checkout / "sample.png").read_bytes()
    assert (
        text.startswith("Final result")
        and "Settings: 8 labels · fp16, weights XL.pt, commit abc1234" in text
    )


@pytest.mark.parametrize(
    "key, value", [("model", "DiT-Demo/2"), ("image_size", 256), ("steps", 25), ("pictures", 1)]
)
def test_another_job_is_marked(checkout, key, value):
    path = checkout / "log" / "mine" / "contest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    done = pack(checkout, "Us", "sample.png", "log/mine")
    assert (
        done.returncode == 0
        and "REHEARSAL, which earns no points" in done.stdout
        and str(value) in done.stdout
    )
    assert [path.name for path in checkout.glob("*.gz")] == ["Us_DiT_rehearsal.tar.gz"]
    with tarfile.open(checkout / "Us_DiT_rehearsal.tar.gz") as archive:
        text = archive.extractfile("Us_DiT_rehearsal/log/FINAL_RESULT.txt").read().decode()
    assert text.startswith("REHEARSAL")


def test_help(checkout):
    done = pack(checkout, "--help")
    assert (
        done.returncode == 0
        and "bash scripts/pack.sh TEAM" in done.stdout
        and "set -" not in done.stdout
    )
    assert not list(checkout.glob("*.gz"))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["a b"], "name the team"),
        (["--team"], "name the team"),
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
