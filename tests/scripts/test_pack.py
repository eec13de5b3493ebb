"""pack.sh: the contest's hand-in holds the work, the judged pictures with their verdict, how to
run it, the team's own logs and report, and no weights.
"""

import json
import os
import re
import shutil
import subprocess
import tarfile
from argparse import Namespace

import contest_log
import pytest
from conftest import ROOT
from forks import refused, succeeds

from evaluate import Lpips
from scripts import report, report_data

CODE = "bench/measure.py", "models.py"
DEMO = "log/cpu.json", "pretrained_models/download.py", "pretrained_models/demo/dit.safetensors"
TRACKED = *CODE, *DEMO, "pretrained_models/large.pt", "log/example/report.md"
PROGRAMS = ".gitignore", "scripts/pack.sh"
OUTPUTS = "log/mine/model.pt", "baseline-1.out", "output/four-2.out"
COMMIT = "-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "x"
HANDIN = (
    "RUN.md",
    "RUN.zh.md",
    "baseline.png",
    "environment.txt",
    "log/FINAL_RESULT.txt",
    "sample.png",
    "verdict.txt",
)


def write_report(folder, lang="en", **fields):
    """Write the report of the log in a checkout as scripts/report.py does there."""
    log = folder / "log/mine"
    for path in log.glob("*.json") if fields else ():
        contest_log.change(path, **fields)
    args = Namespace(lang=lang, team="Us", edition="contest-2025-06", log=log)
    args.picture = log / "contest-4-fp32.png"  # the baseline's: LPIPS needs no weights
    for name, content in report.report(args, Lpips()).items():
        path = folder / f"output/report-{lang}/{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.replace(f"{folder}/".encode(), b""))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A git checkout with measurements in log/mine, their report, and much that does not belong
    into a hand-in.
    """
    folder = tmp_path_factory.mktemp("checkout")
    contest_log.build(folder / "log/mine")
    shutil.copy(folder / "log/mine/fork.png", folder / "log/mine/contest-4-fp32.png")
    record = json.loads((folder / "log/mine/contest-4.json").read_text())
    record["contest"][0]["grids"][0]["picture"] = report_data.digest_of(
        folder / "log/mine/fork.png"
    )
    contest_log.write(folder / "log/mine/contest-4.json", record)
    for name in (*TRACKED, *OUTPUTS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    (folder / "scripts").mkdir()
    for name in PROGRAMS:
        shutil.copy(ROOT / name, folder / name)
    for words in (["init", "-q"], ["add", "--force", *PROGRAMS, *TRACKED], COMMIT):
        subprocess.run(["git", *words], cwd=folder, check=True)
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, cwd=folder, capture_output=True, text=True).stdout.strip()
    write_report(folder, commit=commit)
    return folder


@pytest.fixture
def checkout(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "checkout")


def pack(checkout, *args):
    command = ["bash", "scripts/pack.sh", *map(str, args)]
    return subprocess.run(command, cwd=checkout, text=True, capture_output=True)


def contents(checkout, name="Us_DiT"):
    """File → bytes of an archive."""
    with tarfile.open(checkout / f"{name}.tar.gz") as archive:
        files = [member for member in archive.getmembers() if member.isfile()]
        return {
            member.name.removeprefix(f"{name}/"): archive.extractfile(member).read()
            for member in files
        }


def test_what_is_packed(checkout):
    """What git tracks but large weights and the authors' example; the judged pictures, verdict
    and instructions; the log, the report, Slurm's outputs. A second archive does not hold the
    first.
    """
    for _ in range(2):
        printed = succeeds(pack(checkout, "output/report-en"))
    assert "Precision tier: fp32" in printed and "6 such paragraphs" in printed
    assert printed.splitlines()[-1].startswith("TO WRITE: ")
    packed = contents(checkout)
    measured = {
        str(path.relative_to(checkout))
        for path in (checkout / "log/mine").iterdir()
        if path.suffix != ".pt"
    }
    assert {"log/mine/ladder.fp32.trace.json.gz", "log/mine/notes.en.md"} < measured
    written = {
        str(path.relative_to(checkout))
        for path in (checkout / "output/report-en").rglob("*")
        if path.is_file() and "handin" not in path.parts
    }
    slurm = {"baseline-1.out", "output/four-2.out"}
    assert set(packed) == {*CODE, *DEMO, *PROGRAMS, *HANDIN} | measured | written | slurm
    log = checkout / "log/mine"
    assert packed["sample.png"] == (log / "contest-4-fp32.png").read_bytes()
    assert packed["baseline.png"] == (log / "fork.png").read_bytes()
    assert b"VERDICT: PASS (gate contest-2025-06)" in packed["verdict.txt"]
    assert b"python sample.py --gpus 4" in packed["RUN.md"]
    text = packed["log/FINAL_RESULT.txt"].decode()
    assert text.startswith("Final result: sample.png, from log/mine/contest-4-fp32.png\n")
    assert "on 4 x NVIDIA H200" in text and "Verdict: PASS by contest-2025-06" in text


def test_two_languages(checkout):
    """The notes are written: no line says that a paragraph is missing."""
    notes = checkout / "log/mine/notes.en.md"
    text = notes.read_text().replace("TO WRITE", "Written")
    notes.with_name("notes.zh.md").write_text(text)
    write_report(checkout, lang="zh")
    notes.write_text(text)
    line = refused(pack(checkout, "output/report-en", "output/report-zh"))
    assert "notes.en.md: is not the file of this report; write the report again" in line
    write_report(checkout)
    assert "TO WRITE" not in succeeds(pack(checkout, "output/report-en", "output/report-zh"))
    packed = contents(checkout)
    assert {"output/report-en/report.html", "output/report-zh/report.html"} < set(packed)
    contest_log.change(checkout / "output/report-en/report.json", team="Them")
    line = refused(pack(checkout, "output/report-en", "output/report-zh"))
    assert "output/report-en: is of another team, log, edition or picture" in line


def test_code_that_changed_after_the_measurement_is_named(checkout):
    (checkout / "models.py").write_text("changed")
    line = "Code that changed after the measurement by commit"
    printed = succeeds(pack(checkout, "output/report-en"))
    assert re.search(f"{line} .*: models.py$", printed, re.M)
    assert line.encode() in contents(checkout)["log/FINAL_RESULT.txt"]
    write_report(checkout, commit="0000000-dirty")
    printed = succeeds(pack(checkout, "output/report-en"))
    assert "0000000-dirty: uncommitted code was measured. not a commit here" in printed


@pytest.mark.parametrize("flag", ["--with", "--without"])
def test_files_that_git_does_not_track_need_a_word(flag, checkout):
    for name in ("mine.py", "accel/new.py", "weights.pt", "log/mine/more.txt"):
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text("{}")
    line = "git does not track these files: accel/new.py mine.py; give --with to pack them too"
    assert line in refused(pack(checkout, "output/report-en"))
    assert not list(checkout.glob("*.gz"))
    succeeds(pack(checkout, "output/report-en", flag))
    packed = set(contents(checkout))
    assert ({"mine.py", "accel/new.py"} <= packed) == (flag == "--with")
    assert "log/mine/more.txt" in packed and "weights.pt" not in packed


def test_a_tracked_file_that_is_gone_is_a_line(checkout):
    (checkout / "models.py").unlink()
    line = "git tracks files that are gone: models.py; bring them back"
    assert line in refused(pack(checkout, "output/report-en"))
    assert not list(checkout.glob("*.gz"))


def test_a_rehearsal_is_marked(checkout):
    write_report(checkout, weights="random, seed 0")
    assert "REHEARSAL, which earns no points" in succeeds(pack(checkout, "output/report-en"))
    assert [path.name for path in checkout.glob("*.gz")] == ["Us_DiT_rehearsal.tar.gz"]
    text = contents(checkout, "Us_DiT_rehearsal")["log/FINAL_RESULT.txt"]
    assert text.startswith(b"REHEARSAL, which earns no points: random weights; ")


@pytest.mark.parametrize(
    "file",
    ["output/report-en/handin/sample.png", "output/report-en/handin/baseline.png"],
)
def test_another_picture_than_the_measured_one_is_refused(file, checkout):
    shutil.copy(ROOT / "docs/page.png", checkout / file)
    line = refused(pack(checkout, "output/report-en"))
    assert line == f"pack.sh: {file}: is not the file of this report; write the report again\n"


def test_a_measurement_after_the_report_is_refused(checkout):
    contest_log.change(checkout / "log/mine/contest-4.json", date="2027-01-01")
    line = refused(pack(checkout, "output/report-en"))
    assert "contest-4.json: is not the file of this report; write the report again" in line
    assert not list(checkout.glob("*.gz"))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "name the report: bash scripts/pack.sh output/report"),
        (["--team"], "--team: no such flag; bash scripts/pack.sh --help"),
        (["log/mine"], "log/mine: holds no report; python scripts/report.py log/mine --team"),
        (["output/report-en", "none"], "none: no such file or folder"),
        (["output/report-en", "/etc/hostname"], "/etc/hostname: lies outside the repository"),
    ],
)
def test_what_is_refused(whole, arguments, words):
    assert words in refused(pack(whole, *arguments))
    assert not list(whole.glob("*.gz"))


def test_help(whole):
    printed = succeeds(pack(whole, "--help"))
    assert "bash scripts/pack.sh REPORT [FILE...] [--with|--without]" in printed
    assert "set -" not in printed


def test_without_git(checkout):
    shutil.rmtree(checkout / ".git")
    assert os.path.isdir(checkout / "log")
    assert "git init" in pack(checkout, "output/report-en").stderr
