"""The script that runs all measurements."""

import subprocess

from conftest import ROOT
from forks import succeeds

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


def test_a_whole_file_is_not_measured_again(tmp_path):
    (tmp_path / "verify").mkdir()
    for name in FILES:
        (tmp_path / f"{name}.json").touch()
    text = succeeds(subprocess.run(["bash", SCRIPT, tmp_path], capture_output=True, text=True))
    assert (
        "ladder.json is there" in text
        and f"report.py output/report --team TEAM --log {tmp_path}" in text
    )
    assert sorted(path.stem for path in tmp_path.rglob("*.json")) == sorted(
        name.split("/")[-1] for name in FILES
    )
    assert not any(path.stat().st_size for path in tmp_path.rglob("*.json"))


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
