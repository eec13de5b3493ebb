"""Two texts of the contest's hand-in, for scripts/pack.sh: the result, and the environment.

    python3 scripts/handin.py result PICTURE FILE...       the measurement of this very picture
    python3 scripts/handin.py environment FILE...          packages, machines, commands

FILE...: files and folders with the JSON records of measurements. It needs the standard
library only.
"""

import hashlib
import json
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

# As in bench/jobs.py and bench/harness.py.
CONTEST = dict(model="DiT-XL/2", image_size=512, steps=250, pictures=8)
RANDOM = "random, seed 0"
DAMAGE = ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError


def fail(*lines: str) -> None:
    """End with status 2 and a complaint."""
    print(*(f"pack.sh: {printable(line)}" for line in lines), sep="\n", file=sys.stderr)
    sys.exit(2)


def printable(text: str) -> str:
    """Escape control characters: what a file says does not steer a terminal."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def damaged(file: Path, error: Exception) -> None:
    fail(f"{str(file)!r}: is damaged ({type(error).__name__}); measure again or remove it")


def records(named: list[Path]) -> Iterator[tuple[Path, dict]]:
    """Yield each JSON file with its record, once. Ends the program at a damaged one."""
    files = []
    for path in named:
        files += sorted(path.rglob("*.json")) if path.is_dir() else [path]
    for file in dict.fromkeys(files):
        if file.suffix != ".json" or not file.is_file():
            continue
        try:
            record = json.loads(file.read_bytes())
        except DAMAGE as error:
            damaged(file, error)
        if isinstance(record, dict):
            yield file, record


def machine(record: dict) -> str:
    """Return the number and name of the GPUs of a record."""
    ranks = record.get("gpus", 1)
    if record.get("gpu"):
        return f"{ranks} × {record['gpu']}"
    return "1 process on the CPU" if ranks == 1 else f"{ranks} processes on the CPU"


def measured(named: list[Path]) -> list[tuple[Path, dict, dict]]:
    """Return file, record and row of each picture that a contest measurement made."""
    found = []
    for file, record in records(named):
        try:
            found += [
                (file, record, row) for row in record.get("contest", []) if row.get("picture")
            ]
        except DAMAGE as error:
            damaged(file, error)
    return found


def result(picture: Path, named: list[Path]) -> list[str]:
    """Return the lines of FINAL_RESULT.txt. Ends the program if nothing measured `picture`."""
    digest = hashlib.sha256(picture.read_bytes()).hexdigest()
    rows = measured(named)
    its_own = [entry for entry in rows if entry[2]["picture"] == digest]
    if not its_own:
        fail(*unmeasured(picture, named, rows))
    # The record beside the picture comes first: ranks on a CPU make one picture.
    its_own.sort(key=lambda entry: entry[0].parent != picture.parent)
    file, record, row = its_own[0]
    try:
        lines = [
            f"Final result: final_result.png, from {picture}",
            f"Precision tier: {row['tier']}",
            f"Settings: {row['settings']}, weights {record['weights']}, commit {record['commit']}",
            f"Command: {row.get('command', record.get('command'))}",
            f"Measured in: {file}",
            f"T: {row['seconds']:.2f} s on {machine(record)}",
            f"SHA-256: {digest}",
        ]
        job = "{model}, {pictures} pictures at {image_size} px in {steps} steps".format(**record)
        of_random = RANDOM in (record["weights"], record.get("decoder"))
        other_job = any(record[key] != value for key, value in CONTEST.items())
    except DAMAGE as error:
        damaged(file, error)
    if other_job:
        lines.insert(0, f"REHEARSAL, which earns no points: {job}, not the contest's job")
    elif of_random:
        remedy = "measure with --ckpt and --vae"
        lines.insert(0, f"REHEARSAL, which earns no points: random weights; {remedy}")
    return lines


def unmeasured(picture: Path, named: list[Path], rows: list) -> list[str]:
    """Return the complaint about a picture of no measurement, with those that have one: in the
    named records, and where the batch files and docs/contest.md put theirs.
    """
    usual = [*Path("output").glob("job_*/*.json"), *Path("log").glob("*/final/*.json")]
    kept = [
        file.parent / row["file"] for file, _, row in [*measured(usual), *rows] if "file" in row
    ]
    here = dict.fromkeys(str(path) for path in kept if path.is_file())
    where = " ".join(str(path) for path in named if path.suffix != ".out") or "any named file"
    complaint = f"{picture}: is not the picture of a contest measurement in {where}; "
    if here:
        return [complaint + f"name one that is: {' '.join(here)}"]
    measure = "python bench/jobs.py --contest --output log/mine/final/contest.json"
    return [
        complaint + f"measure it: {measure} (with the flags of your run: a tier after "
        "--contest, --gpus, --ckpt, --vae), then name log/mine/final/contest-TIER.png"
    ]


def environment(named: list[Path]) -> list[str]:
    """Return the lines of environment.txt: packages, and each measurement's origin."""
    lines = ["Measurements in this archive, their machines and command lines:", ""]
    for file, record in records(named):
        if "command" not in record:
            continue
        facts = [
            f"{file}: {machine(record)}",
            f"driver {record.get('driver')}" if record.get("gpu") else None,
            f"Python {record['python']}" if "python" in record else None,
            f"torch {record.get('torch')}",
            f"commit {record.get('commit')}",
            str(record.get("date")),
        ]
        lines += [", ".join(filter(None, facts)), f"    {record['command']}"]
    python = f"Python {platform.python_version()}, {platform.platform()}"
    packages = {f"{one.metadata['Name']}=={one.version}" for one in distributions()}
    if not any(package.startswith("torch==") for package in packages):
        print(
            f"pack.sh: {sys.executable} has no torch, so environment.txt does not list the "
            "packages of your measurements; activate their environment and pack again",
            file=sys.stderr,
        )
    return [*lines, "", f"Packages, {python}:", "", *sorted(packages, key=str.lower)]


def main() -> None:
    command, *arguments = sys.argv[1:]
    paths = [Path(argument) for argument in arguments]
    lines = result(paths[0], paths[1:]) if command == "result" else environment(paths)
    print(*map(printable, lines), sep="\n")


if __name__ == "__main__":
    main()
