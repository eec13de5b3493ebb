"""FID jobs in real processes, for the tests of accel/fid."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from conftest import ROOT
from PIL import Image

SCRIPT = ROOT / "sample_ddp.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def start(world, *args, **environment):
    """A job of so many ranks: one is the process itself, several run under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
    return subprocess.Popen(
        [sys.executable, *(launcher if world > 1 else []), str(SCRIPT), *map(str, args)],
        cwd=ROOT,
        env={**ENVIRONMENT, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process, status=0, seconds=120):
    """Standard output and error. A launcher ends with 1 for every failure and prints the rank's status."""
    try:
        text = "\n".join(process.communicate(timeout=seconds))
    finally:
        process.kill()
    launched = "torch.distributed.run" in process.args
    assert process.returncode == (1 if launched and status else status), text
    assert not (launched and status) or f"exitcode  : {status}" in text, text
    return text


def run(world, *args, status=0, **environment):
    return finish(start(world, *args, **environment), status)


def ranks_of(process):
    """Process ids of a job's ranks."""
    if "torch.distributed.run" not in process.args:
        return [process.pid]
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout
    return sorted(map(int, children.split()))


def wait_for_pictures(folder, count, process, seconds=60):
    """Until a job that is at work has made so many; False if it has ended."""
    deadline = time.monotonic() + seconds
    while len(list(Path(folder).glob("*/*.png"))) < count:
        assert time.monotonic() < deadline
        if process.poll() is not None:
            return False
        time.sleep(0.01)
    return True


def files(folder):
    """Every file below a folder with its bytes: pictures, .npz, records."""
    return {
        str(file.relative_to(folder)): file.read_bytes() for file in sorted(Path(folder).rglob("*")) if file.is_file()
    }


def pictures(folder):
    """Pixels by file name."""
    return {file.name: np.asarray(Image.open(file)) for file in sorted(Path(folder).glob("*/*.png"))}
