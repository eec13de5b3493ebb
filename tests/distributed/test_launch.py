"""sample.py --gpus in real processes, as CPU ranks: the same picture, and how it ends. A
terminal holds the command.
"""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from forks import refused, until
from jobs import ENVIRONMENT, Command
from networks import build
from PIL import Image
from safetensors.torch import save_file

from accel import launch
from accel.errors import INTERRUPTED, STOPPED, USAGE
from accel.launch import processes


class Terminal(Command):
    """sample.py --gpus 2 in the foreground of a terminal of its own."""

    def __init__(self, *args):
        self.ours, self.theirs = pty.openpty()
        os.set_blocking(self.ours, False)
        # tqdm draws none of no width
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
        self.text = ""
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), self.theirs)
        super().__init__(ROOT / "sample.py", *args, "--gpus", 2, streams=streams)
        os.close(self.theirs)

    def begin(self):
        super().begin()
        fcntl.ioctl(self.theirs, termios.TIOCSCTTY, 0)

    def read(self, until=None, seconds=200):
        """Until `until` stands on the terminal, or the command has ended → its text."""
        deadline = time.monotonic() + seconds
        ended = False
        while not ended and (until is None or until not in self.text):
            assert time.monotonic() < deadline, self.text
            ended = self.process.poll() is not None
            try:
                while part := os.read(self.ours, 65536):
                    self.text += part.decode()
            except OSError:  # nothing to read now, or the other end is closed
                time.sleep(0.01)
        return self.text

    def end(self, status):
        """What it showed, once it has ended so: the cursor in a fresh line and no process left."""
        try:
            text = self.read()
            assert self.process.returncode == status, text
            assert re.search(r"(\n|\r\x1b\[K)\Z", text), text
            assert not self.alive()
            return text
        finally:
            os.close(self.ours)
            self.kill()
            self.process.wait()


def test_the_picture_of_one_process(demo, here, tmp_path):
    flags = [*demo, "--num-sampling-steps", 4, "--labels", 5, 0, 2, "--output"]
    done = here("sample.py", *flags, tmp_path / "one.png")
    assert done.returncode == 0 and re.search(r" · [\d.]+ s since start$", done.stdout), done
    text = Terminal(*flags, tmp_path / "two.png").end(status=0)
    assert text.count(" · 2 ranks") == text.count("s since start") == 1
    one, two = (
        np.asarray(Image.open(tmp_path / name)).astype(int) for name in ("one.png", "two.png")
    )
    assert one.std() > 1 and np.abs(one - two).max() <= 1  # GEMMs of fewer rows round otherwise


LONG = ["--num-sampling-steps", 1000, "--labels", 1, 2]


@pytest.mark.parametrize(
    "ask, status, line",
    [
        (lambda job: os.write(job.ours, b"\x03"), INTERRUPTED, "interrupted"),  # Ctrl-C
        (
            lambda job: job.process.send_signal(signal.SIGTERM),
            STOPPED,
            "stopped; start again with the same command",
        ),
        (
            lambda job: os.kill(job.alive()["1"][0], signal.SIGKILL),
            1,
            "rank 1 of 2: ended by signal 9",
        ),
    ],
    ids=["ctrl-c", "SIGTERM", "a killed rank"],
)
def test_all_end_together(ask, status, line, demo, tmp_path):
    job = Terminal(*demo, *LONG, "--output", tmp_path / "x.png")
    job.read(until="/1000")  # the bar shows that it samples
    ask(job)
    text = job.end(status)
    assert (
        text.endswith(f"\r\nsample.py: {line}\r\n")
        and text.count("sample.py:") == 1
        and "Traceback" not in text
    )
    assert list(tmp_path.iterdir()) == []


def test_a_signal_that_nohup_ignores_ends_nothing(demo, tmp_path):
    words = [ROOT / "sample.py", *demo, "--num-sampling-steps", 4, "--labels", 1, 2, "--gpus", 2]
    command = ["nohup", sys.executable, *map(str, words), "--output", str(tmp_path / "x.png")]
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, **quiet)
    until(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text)  # the ranks
    process.send_signal(signal.SIGHUP)
    assert process.wait(120) == 0 and (tmp_path / "x.png").exists()


def test_a_mistake_is_said_once(demo, tmp_path):
    path = tmp_path / "w.safetensors"
    state = build("DiT-Demo/2").state_dict()
    state["final_layer.linear.bias"][0] = float("inf")
    save_file(state, path)
    flags = [*demo[:3], path, *demo[4:], "--num-sampling-steps", 2, "--output", tmp_path / "x.png"]
    text = Terminal(*flags).end(USAGE)
    assert (
        text.count("sample.py: ") == 1
        and "not finite from step 1 of 2 on; check the weights" in text
        and "Traceback" not in text
    )
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    "gpus, environment, words",
    [
        ("0", {}, "0: must be from 1 to 64, or all"),
        ("two", {}, "two: must be from 1 to 64, or all"),
        ("all", {}, "--gpus all: 0 GPUs here; give a number"),
        ("2", {"RANK": "0"}, "torchrun, srun or mpirun has started several processes"),
        (1, {"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun has started several processes, and each"),
        (1, {"PMI_SIZE": "2"}, "start sample_ddp.py by torchrun or srun, or one process"),
        ("all", {"SLURM_STEP_NUM_TASKS": "4"}, "mpirun has started several processes, and each"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(gpus, environment, words, demo, here, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = here("sample.py", *demo, "--gpus", gpus)
    assert words in refused(done) and not done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpus_that_are_not_there_are_one_line(demo, tmp_path):
    words = *demo[:-2], "--gpus", 2, "--output", tmp_path / "x.png"
    status, error = Command(ROOT / "sample.py", *words).end()
    assert status == USAGE and error.startswith("sample.py: this machine has 0 GPUs; "), error
    assert "use --device cpu" in error and error.count("\n") == 1, error


@pytest.mark.parametrize(
    "ranks",
    [
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
    ],
)
def test_a_launchers_ranks_do_not_all_make_the_same_picture(ranks, tmp_path):
    """They are refused before torch is imported, and by the first rank alone."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), **ranks}
    first, second = environment, {**environment, "RANK": "1", "SLURM_PROCID": "1"}
    if "RANK" not in ranks:
        del second["RANK"]
    command = [sys.executable, ROOT / "sample.py", "--output", "x.png"]
    how = dict(cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    started = [subprocess.Popen(command, env=each, **how) for each in (first, second)]
    errors = [process.communicate(timeout=240)[1] for process in started]
    assert [process.returncode for process in started] == [USAGE, USAGE]
    assert "start sample_ddp.py" in errors[0] and errors[0].count("\n") == 1 and not errors[1]
    assert [path.name for path in tmp_path.iterdir()] == ["torch.py"]


def test_one_gpu_is_this_process(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")  # an interactive shell under srun
    monkeypatch.setenv("SLURM_NTASKS", "4")  # a batch script, whose step has one task
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert [launch.world_size(n, None) for n in (1, 2)] == [1, 2]
    monkeypatch.setenv("RANK", "0")
    assert launch.world_size(1, None) == 1


def test_a_rank_that_ignores_sigterm_is_killed():
    rank = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo; exec sleep 60"], stdout=subprocess.PIPE
    )
    rank.stdout.readline()
    processes.terminate([rank])
    assert rank.returncode == -signal.SIGKILL


def test_a_rank_whose_parent_has_ended_does_not_begin():
    """Before it could ask to be ended with it."""
    code = "from accel import launch; launch.begin(); print('begun')"
    env = {**os.environ, "DIT_BEGAN": f"1.000000 {os.getppid()}"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert (
        done.returncode == 1
        and done.stderr == "-c: the process that started this rank has exited\n"
    )
    assert not done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("device", [None, "cuda:0", "cpu"])
def test_the_context_is_made_while_torch_is_imported(device):
    code = f"""
import time
from accel.launch import import_torch
import_torch({device!r})
import torch
from cuda.bindings import driver
driver.cuInit(0)
until = time.monotonic() + 5
active = 0
while not active and time.monotonic() < until:
    active = driver.cuDevicePrimaryCtxGetState(driver.cuDeviceGet(0)[1])[2]
    time.sleep(0.01)
print(active, torch.cuda.is_initialized())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0" if device == "cpu" else "1", "False"]
