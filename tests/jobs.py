"""Jobs of sample_ddp.py in real processes."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from forks import ROOT, Fork, environments, kill, ranks, torchrun, until
from PIL import Image

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests"))),
}


def start(world, *args, launch=(), cwd=ROOT):
    """A job of so many ranks on this host: one is the process itself, several run under
    torchrun.
    """
    launcher = torchrun(world, *launch) if world > 1 or launch else []
    return Fork([*launcher, ROOT / "sample_ddp.py", *args], cwd, **ENVIRONMENT)


def finish(*processes, status=0, seconds=200):
    """Their standard output and error. A launcher ends with 1 for every failure and
    prints the rank's status.
    """
    texts = []
    deadline = time.monotonic() + seconds
    try:
        for process in processes:
            texts += process.communicate(timeout=max(1, deadline - time.monotonic()))
    finally:
        kill(*processes)
    text = "\n".join(texts)
    for process in processes:
        launched = "torch.distributed.run" in process.args
        assert process.returncode == (1 if launched and status else status), text
        assert not (launched and status) or f"exitcode  : {status}" in text, text
    return text


def start_ranks(world, *args, script="sample_ddp.py", **environment):
    """The ranks of a job, which no launcher holds."""
    return ranks(world, [ROOT / script, *args], **ENVIRONMENT, **environment)


def run(world, *args, status=0, **how):
    """What such a job printed, once each rank has ended with `status`."""
    return finish(*start_ranks(world, *args, **how), status=status, seconds=280)


def run_each(world, *commands, **environment):
    """Several commands by the same ranks: the texts that they print."""
    commands = json.dumps([list(map(str, command)) for command in commands])
    worker = "tests/distributed/commands_worker.py"
    return json.loads(run(world, commands, script=worker, **environment).splitlines()[0])


def ranks_of(process):
    """Process ids of a job's ranks, in their order."""
    if "torch.distributed.run" not in process.args:
        return [process.pid]
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True
    ).stdout
    found = {
        int(variables["RANK"]): pid
        for pid, variables in environments(listed.split())
        if "RANK" in variables
    }
    return [found[rank] for rank in sorted(found)]


def wait_for_pictures(folder, count, process, seconds=120):
    """Until a job that is at work has made so many; False if it has ended."""

    def made():
        return len(list(Path(folder).glob("*/*.png"))) >= count

    until(lambda: made() or process.poll() is not None, seconds)
    return made()


class Command:
    """A command with a mark that all its descendants inherit. streams: of subprocess.Popen."""

    def __init__(self, *args, streams=None, **environment):
        self.mark = secrets.token_hex(8)
        self.process = subprocess.Popen(
            [sys.executable, *map(str, args)],
            env={**os.environ, **ENVIRONMENT, **environment, "ENDING_TEST": self.mark},
            **(streams or dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)),
            start_new_session=True,
            preexec_fn=self.begin,
        )

    def begin(self):
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def alive(self):
        """Return the ids of the command's running processes by rank; the launcher's rank is ""."""
        found = {}
        for pid, variables in environments():
            if variables.get("ENDING_TEST") == self.mark:
                found.setdefault(variables.get("RANK", ""), []).append(pid)
        return found

    def wait_for(self, text):
        line = ""
        while text not in line:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()

    def end(self):
        """Wait until no process of the command is left, and return (status, standard error)."""
        try:
            _, error = self.process.communicate(timeout=200)
            until(lambda: not self.alive(), where=self.alive)
            return self.process.returncode, error
        finally:
            self.kill()

    def kill(self):
        for pids in self.alive().values():
            for pid in pids:
                os.kill(pid, signal.SIGKILL)


def files(folder):
    """Every file below a folder with its bytes: pictures, .npz, records. The lock names the last
    process.
    """
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(Path(folder).rglob("*"))
        if file.is_file() and file.name != "lock"
    }


def pictures(folder):
    """Pixels by file name."""
    return {
        file.name: np.asarray(Image.open(file)) for file in sorted(Path(folder).glob("*/*.png"))
    }
