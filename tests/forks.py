"""Commands in processes of their own that are forks of one which has imported torch: a fresh python takes 3 s for it.

The parent, one a pytest process, has imported nothing of ours. Ranks are started as srun starts them, without a
launcher of their own.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch"])


class Fork:
    """As subprocess.Popen of this python with `words`: a file, -m and a module, or -c and code; then its arguments.

    It has the interface of Popen as far as tests use it. environment: more variables than this process has.
    """

    def __init__(self, words, cwd=ROOT, **environment):
        self.args = list(map(str, words))
        self._folder = TemporaryDirectory()
        self._places = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        for place in self._places:
            place.touch()
        environment = {**os.environ, **environment}
        self._process = SERVER.Process(target=_become, args=(self.args, cwd, environment, self._places), daemon=True)
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

    def communicate(self, timeout=None):
        self.wait(timeout)
        return self.text()

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)


def _become(words, cwd, environment, places):
    """In the fork: be the process that was asked for."""
    import torch

    for number, place in enumerate(places, start=1):
        os.dup2(os.open(place, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count())))
    others = [path for path in sys.path if not Path(path).is_relative_to(ROOT) or "site-packages" in path]
    given = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    first = "" if words[0] in ("-c", "-m") else str(Path(words[0]).resolve().parent)
    sys.path[:] = dict.fromkeys([first, *given, *others])
    sys.argv = words if first else words[1:]
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(words[0], run_name="__main__")


def run(words, cwd=ROOT, timeout=240, **environment):
    """As subprocess.run of this python with `words`."""
    process = Fork(words, cwd, **environment)
    try:
        return subprocess.CompletedProcess(process.args, process.wait(timeout), *process.text())
    finally:
        process.kill()


def ranks(world, words, cwds=None, **environment):
    """The ranks of a job on this host; cwds: each in its own folder."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        environment |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]), WORLD_SIZE=str(world))
    cwds = cwds or [ROOT] * world
    return [Fork(words, cwds[rank], RANK=str(rank), LOCAL_RANK=str(rank), **environment) for rank in range(world)]
