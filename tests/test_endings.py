"""However a command ends, it is one line and a status, and nothing of ours is left: real
processes, found in /proc by a variable of their environment.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import forks
import pytest
from conftest import ROOT
from jobs import ENVIRONMENT, Command

from accel.errors import INTERRUPTED, STOPPED, USAGE
from accel.launch import ENDINGS


class Launcher(Command):
    """The same for torchrun, in a fork of a process that has torch; its ranks are new processes."""

    def __init__(self, *args):
        self.mark = secrets.token_hex(8)
        command = [*forks.torchrun(2), ROOT / "sample_ddp.py", *args]
        self.process = forks.Fork(command, **ENVIRONMENT, ENDING_TEST=self.mark)
        self.wait_for = self.process.wait_for


LONG = "--num-sampling-steps", 1000, "--labels", 1, 2


@pytest.mark.parametrize(
    "launch, who, number",
    [
        ("torchrun", "0", "KILL"),
        ("torchrun --parallel tokens=2", "1", "KILL"),  # every layer of the other rank waits for it
        ("torchrun", "", "TERM"),
    ],
)
def test_nothing_is_left_of_a_job(launch, who, number, demo, tmp_path):
    """A rank is killed or the launcher terminated in the middle of sampling; --gpus:
    tests/distributed/test_launch.py.
    """
    _, *flags = launch.split()
    job = Launcher(*demo, *LONG, *flags, "--output", tmp_path / "x.png")
    job.wait_for("parallel:" if flags else " · 2 ranks")
    os.kill(job.alive()[who][0] if who else job.process.pid, signal.Signals[f"SIG{number}"])
    status, error = job.end()
    assert status != 0 and list(tmp_path.iterdir()) == [], error


@pytest.mark.parametrize(
    "program, rank", [("sample.py", {}), ("sample_ddp.py", dict(RANK="0", WORLD_SIZE="1"))]
)
def test_a_command_outlives_the_shell_that_started_it(program, rank, demo, tmp_path):
    """Only ranks of torchrun and --gpus end with their parent."""
    command = [sys.executable, ROOT / program, *demo, "--num-sampling-steps", 2, "--labels", 1]
    words = map(str, [*command, "--output", tmp_path / "x.png"])
    subprocess.run(
        ["sh", "-c", '"$@" &', "sh", *words], env={**os.environ, **ENVIRONMENT, **rank}, check=True
    )
    forks.until((tmp_path / "x.png").exists)


@pytest.mark.parametrize("launch", ["torchrun", "--gpus"])
def test_nothing_is_left_of_a_launcher_that_is_killed_while_ranks_start(launch, demo, tmp_path):
    flags = *demo, *LONG, "--output", tmp_path / "x.png"
    job = Launcher(*flags) if launch == "torchrun" else Command("sample.py", *flags, "--gpus", 2)
    forks.until(lambda: {"0", "1"} <= job.alive().keys(), where=job.alive)
    job.process.kill()
    job.end()
    assert list(tmp_path.iterdir()) == []


SIGNAL = """
import os, signal, sys, weakref
class Finder:
    def find_spec(name, path=None, target=None):
        if name == os.environ.get("SIGNAL_AT"):
            os.environ["SIGNAL_AT"] = ""
            number = int(os.environ["SIGNAL"])
            weakref.ref(Finder(), lambda _: signal.raise_signal(number))
sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize(
    "command, module, number",
    [
        ("sample.py", "torch._C", signal.SIGINT),
        ("sample.py", "numpy", signal.SIGTERM),
        ("sample_ddp.py", "accel.distributed.launched", signal.SIGINT),
        ("sample_ddp.py --num-fid-samples 8", "accel.cli", signal.SIGUSR1),
        ("scripts/verify.py", "numpy", signal.SIGINT),
    ],
)
def test_a_signal_in_an_import_is_a_line(command, module, number, tmp_path):
    """Python ignores what the signal's handler raises there: in a callback of a weak reference, as
    the import system has one for every module.
    """
    (tmp_path / "sitecustomize.py").write_text(SIGNAL)
    path = os.pathsep.join(map(str, (tmp_path, ROOT)))
    words = *command.split(), "--model", "DiT-Demo/2"
    environment = dict(PYTHONPATH=path, SIGNAL_AT=module, SIGNAL=str(int(number)))
    status, line = ENDINGS[number]
    ended = Command(*words, **environment).end()
    assert ended == (status, f"{Path(words[0]).name}: {line}\n")


@pytest.mark.parametrize(
    "script, number, status, word",
    [
        ("sample.py", "TERM", STOPPED, "stopped; start again with the same command"),
        ("sample_ddp.py", "INT", INTERRUPTED, "interrupted"),
    ],
)
def test_a_signal_while_it_samples_is_a_line(script, number, status, word, demo, tmp_path):
    """SLURM_PROCID is set in a batch script too, which is not a step of srun."""
    command = Command(ROOT / script, *demo, *LONG, "--output", tmp_path / "x.png", SLURM_PROCID="0")
    command.wait_for("DiT-Demo/2 · ")
    time.sleep(0.5)
    command.process.send_signal(signal.Signals[f"SIG{number}"])
    ended, error = command.end()
    assert ended == status and error.endswith(f"{script}: {word}\n"), error
    assert "Traceback" not in error and not list(tmp_path.glob("*.p*"))


@pytest.mark.parametrize(
    "command",
    [
        "sample.py",
        "sample_ddp.py",
        "download.py",
        "evaluate.py a b",
        "scripts/report.py out",
        "scripts/fid.py a b",
    ],
)
def test_without_an_environment_a_line_says_how_to_activate_it(command):
    """Python without its installed packages."""
    done = subprocess.run(
        [sys.executable, "-S", *command.split()], cwd=ROOT, capture_output=True, text=True
    )
    line = r"\w+\.py: \w+ is not installed here; activate the environment \(source .venv/bin/act"
    assert done.returncode == USAGE and done.stderr.count("\n") == 1, done.stderr
    assert re.match(line, done.stderr)
