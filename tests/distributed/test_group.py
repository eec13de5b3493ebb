"""The ranks of a job: how they are asked to stop, what a thread's failure does, and how they find out that they disagree."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT

from accel.options import STOPPED, UsageError
from accel.parallel.group import Group
from accel.parallel.rows import agree


def test_a_signal_inside_the_handler_of_another_does_not_lock():
    """As when a launcher and a queue both ask: the second comes while the first is being noted, wherever that is."""
    group, met = Group(0, 1, 0, dist.HashStore()), []

    def again(frame, event, _):
        if (
            len(met) < 50
            and event == "line"
            and frame.f_code.co_name != "test_a_signal_inside_the_handler_of_another_does_not_lock"
        ):
            met.append(event)
            signal.raise_signal(signal.SIGUSR1)
        return again

    before = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))  # a lock is not interrupted by an exception
    try:
        group.stop_on_signals(signal.SIGUSR1)
        assert not group.stopping
        signal.alarm(20)
        sys.settrace(again)
        signal.raise_signal(signal.SIGUSR1)
        sys.settrace(None)
        assert met and group.stopping
    finally:
        sys.settrace(None)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, before)
        group.leave()


def test_a_failure_of_the_watching_thread_ends_the_job_with_its_cause():
    """Not in silence, which the other ranks would take for this rank's death half a minute later; also where they cannot be told."""
    code = (
        "import time\nfrom accel.parallel.group import Group, job\n"
        "def broken_bar(store): raise ZeroDivisionError('of the bar')\ndef gone(*_): raise RuntimeError('no store')\nGroup._fail = gone\n"
        "with job('test') as group:\n    group.on_beat = broken_bar\n    time.sleep(30)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert (
        done.returncode == 1
        and "Traceback" in done.stderr
        and done.stderr.endswith("rank 0: ZeroDivisionError: of the bar\n")
    ), done.stderr


def test_ranks_with_different_latents_fail():
    """Two groups of one job in two threads; a rank that is left idle has no say."""
    store, latents = dist.HashStore(), torch.randn(2, 4, 8, 8)

    def rank(number):
        group, heard = Group(number, 3, number, store), []
        for mine, busy in (
            (latents, 3),
            (latents * number, 1),
            (latents + number * 1e-6, 3),
            (latents + (number > 1), 2),
        ):
            try:
                agree(group, mine, busy)
                heard.append("agreed")
            except RuntimeError as error:
                heard.append(str(error))
        group.leave()
        return heard

    with ThreadPoolExecutor(3) as pool:
        for heard in pool.map(rank, range(3)):
            assert (
                heard[:2] == ["agreed"] * 2
                and "different latents" in heard[2]
                and heard[2].count(",") == 2
                and heard[3] == "agreed"
            )


@pytest.mark.parametrize("name", ("gpu7", "mps", "meta", "cuda:x"))
def test_what_is_no_device_is_refused_not_replaced(name):
    group = Group(0, 1, 0, dist.HashStore())
    with pytest.raises(UsageError, match=f"--device {name}: .* cuda or cpu"):
        group.device(name)
    assert group.device("cpu") == "cpu"
    group.leave()


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGUSR1))
def test_an_fid_job_that_is_stopped_while_it_starts_can_be_continued(number):
    """Queues take nodes away whenever they like: the batch file requeues on this status alone."""
    job = subprocess.Popen(
        [sys.executable, str(ROOT / "sample_ddp.py"), "--model", "DiT-Demo/2", "--num-fid-samples", "8"],
        cwd=ROOT,
        text=True,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 20
    while not caught(job.pid) >> (number - 1) & 1:
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    job.send_signal(number)
    _, error = job.communicate(timeout=20)
    assert job.returncode == STOPPED and error.count("\n") == 1 and "start again with the same command" in error


def test_srun_without_scontrol_is_told_what_to_export(tmp_path):
    """As in a container without Slurm's commands."""
    step = dict(
        SLURM_STEP_NUM_TASKS="2",
        SLURM_PROCID="0",
        SLURM_LOCALID="0",
        SLURM_JOB_ID="7",
        SLURM_STEP_ID="0",
        SLURM_STEP_NODELIST="n[1-2]",
        PATH=str(tmp_path),
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "sample_ddp.py"), "--model", "DiT-Demo/2"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env={**{name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "RANK"))}, **step},
    )
    assert (
        done.returncode == 2
        and done.stderr.count("\n") == 1
        and "sample_ddp.py: srun: " in done.stderr
        and "export MASTER_ADDR" in done.stderr
    )


def caught(process):
    """The signals that a process handles, as the kernel's mask."""
    with open(f"/proc/{process}/status") as status:
        return int(next(line for line in status if line.startswith("SigCgt")).split()[1], 16)
