"""Run commands in forks of a process that has imported torch and the other packages of a command,
which takes a fresh interpreter three seconds.

Every pytest process has one such parent, by the standard library's fork server. It
imports nothing of this repository.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
SERVER = multiprocessing.get_context("forkserver")
# Without triton: tests of its interpreter choose it by a variable before the import.
SERVER.set_forkserver_preload(["torch.distributed.run", "safetensors.torch", "PIL.Image"])


class Fork:
    """A Python process, with the part of subprocess.Popen's interface that tests use.

    command: what follows `python`. environment: variables to add to those of this process.
    """

    def __init__(self, command, cwd=ROOT, **environment):
        self.args = list(map(str, command))
        self._folder = TemporaryDirectory()
        self._places = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        for place in self._places:
            place.touch()
        environment = {**os.environ, **environment}
        self._process = SERVER.Process(
            target=_run, args=(self.args, cwd, environment, self._places), daemon=True
        )
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        return self._process.exitcode

    returncode = property(poll)

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def text(self):
        """What it has printed so far: standard output, standard error."""
        return tuple(place.read_text() for place in self._places)

    def wait_for(self, text, seconds=120):
        """Until `text` stands in its standard output."""
        until(lambda: text in self.text()[0] or self.poll() is not None, seconds, self.text)
        assert text in self.text()[0], self.text()

    def communicate(self, timeout=None):
        self.wait(timeout)
        return self.text()

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)


def _run(command, cwd, environment, places):
    """Run `command` in this fork as a fresh interpreter would."""
    import torch

    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's `&` has had ignored
    for number, place in enumerate(places, start=1):
        os.dup2(os.open(place, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    others = [
        path for path in sys.path if not Path(path).is_relative_to(ROOT) or "site-packages" in path
    ]
    given = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    first = "" if command[0] in ("-c", "-m") else str(Path(command[0]).resolve().parent)
    sys.path[:] = dict.fromkeys([first, *given, *others])
    sys.argv = command if first else command[1:]
    if command[0] == "-m":
        sys.argv[0] = "-m"  # as Python has it while it looks for the module
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(command[0], run_name="__main__")


def run(command, cwd=ROOT, timeout=240, **environment):
    """Run `command` to its end → subprocess.CompletedProcess."""
    process = Fork(command, cwd, **environment)
    try:
        return subprocess.CompletedProcess(process.args, process.wait(timeout), *process.text())
    finally:
        process.kill()


def until(found, seconds=200, where=lambda: None, pause=0.01):
    """Wait until found() is true, and return it. where() is shown if that takes too long."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline, where()
        time.sleep(pause)
    return value


def environments(processes=None):
    """Yield (id, variables) of processes, by default of all that may be looked at."""
    for pid in processes or filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            yield int(pid), dict(entry.partition("=")[::2] for entry in entries)


def succeeds(done):
    """Return what a command printed, which has succeeded."""
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(done):
    """Return the line of a command that has refused its input."""
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ranks(world, command, cwd=ROOT, started=None, a_node=None, **environment):
    """Start the ranks of a job on this host as srun does: without a launcher that ends
    all once one has ended.

    started: so many only. a_node: ranks of a node, by default all.
    """
    environment |= dict(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(world)
    )
    return [
        Fork(command, cwd, RANK=str(rank), LOCAL_RANK=str(rank % (a_node or world)), **environment)
        for rank in range(started or world)
    ]


def torchrun(world, *options):
    """What follows `python` to start so many ranks; options: in place of --standalone."""
    return [
        "-m",
        "torch.distributed.run",
        *(options or ["--standalone"]),
        f"--nproc_per_node={world}",
    ]


def kill(*processes):
    """Kill all, then wait for each."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
