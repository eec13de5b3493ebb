"""The script that runs all measurements."""

import subprocess

from conftest import ROOT

SCRIPT = ROOT / "scripts" / "measure.sh"
FILES = ["profile-baseline", "profile-fast", "ladder", "versus", "contest", "verify/verify", "parallel", "ddp"]


def test_a_whole_file_is_not_measured_again(tmp_path):
    (tmp_path / "verify").mkdir()
    for name in FILES:
        (tmp_path / f"{name}.json").touch()
    done = subprocess.run(["bash", SCRIPT, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (
        "ladder.json is there" in done.stdout and f"report.py output/report --team TEAM --log {tmp_path}" in done.stdout
    )
    assert sorted(path.stem for path in tmp_path.rglob("*.json")) == sorted(name.split("/")[-1] for name in FILES)
    assert not any(path.stat().st_size for path in tmp_path.rglob("*.json"))


def test_it_names_its_folder():
    for arguments, status, words in ((["--help"], 0, "bash scripts/measure.sh FOLDER"), ([], 2, "name the folder")):
        done = subprocess.run(["bash", SCRIPT, *arguments], capture_output=True, text=True)
        assert done.returncode == status and words in done.stdout + done.stderr and "set -" not in done.stdout


def test_a_place_that_takes_no_files_is_a_line():
    for place in "/dev/null", "/proc/nowhere", "/proc":
        done = subprocess.run(["bash", SCRIPT, place], capture_output=True, text=True)
        line = f"measure.sh: {place}: no folder can be made or written there; name another\n"
        assert (done.returncode, done.stderr) == (2, line)
