"""The script that runs all measurements: a stopped run resumes."""

import os
import subprocess

from conftest import ROOT

PYTHON = """#!/bin/bash
case "$*" in
-c*device_count*) echo 0 ;;
-c*) echo fp32 ;;
*)
  while [[ $1 != --output ]]; do shift; done
  echo "${2##*/}" >>started
  [[ $2 == *verify ]] && { mkdir -p "$2"; echo '{}' >"$2/verify.json"; exit 3; }
  echo '{"half": ' >"$2"
  [[ -e die && $2 == *ladder.json ]] && kill -KILL $PPID
  echo '{}' >"$2" ;;
esac
"""


def test_a_measurement_that_was_cut_short_is_made_again(tmp_path):
    """The scripts write what they have as they go, so a file that is there need not be whole. python and torchrun are
    stand-ins: this is about the shell."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "measure.sh").write_text((ROOT / "scripts" / "measure.sh").read_text())
    for name in ("python", "torchrun"):
        (tmp_path / name).write_text(PYTHON)
        (tmp_path / name).chmod(0o755)

    def measure():
        done = subprocess.run(
            ["bash", "scripts/measure.sh", "out"],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
        )
        started = (tmp_path / "started").read_text().split() if (tmp_path / "started").exists() else []
        (tmp_path / "started").unlink(missing_ok=True)
        return done, started

    (tmp_path / "die").touch()
    done, started = measure()
    assert done.returncode < 0 and started == ["profile-baseline.json", "profile-fast.json", "ladder.json"]
    (tmp_path / "die").unlink()
    done, started = measure()
    assert done.returncode == 0 and started == [
        "ladder.json",
        "sweep.json",
        "contest.json",
        "verify",
        "link.json",
        "parallel.json",
        "ddp.json",
    ], done.stderr
    assert "--gate" not in done.stdout  # sixty-four pictures a plan are an hour of a CPU
    assert "report.py" in done.stdout and not list((tmp_path / "out").rglob("*.unfinished"))
    assert measure()[1] == []  # all are whole


def test_it_names_its_folder():
    for arguments, status, words in ((["--help"], 0, "bash scripts/measure.sh FOLDER"), ([], 2, "name the folder")):
        done = subprocess.run(["bash", "scripts/measure.sh", *arguments], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == status and words in done.stdout + done.stderr and "set -" not in done.stdout


def test_a_place_that_takes_no_files_is_a_line():
    for place in "/dev/null", "/proc/nowhere", "/proc":
        done = subprocess.run(["bash", ROOT / "scripts" / "measure.sh", place], capture_output=True, text=True)
        line = f"measure.sh: {place}: no folder can be made or written there; name another\n"
        assert (done.returncode, done.stderr) == (2, line)
