"""The ranks of a job: what they exchange, how they are asked to stop, and how they end;
in real processes over gloo.
"""

import os
import re
import signal
import sys
from pathlib import Path

import forks
import pytest
from jobs import ENVIRONMENT

from accel.distributed import Ranks, launched
from accel.errors import STOPPED, USAGE

WORKER = Path(__file__).with_name("job_worker.py")


def under_torchrun(*command):
    """Run a command that fails on two ranks → (exit statuses by rank, standard error)."""
    done = forks.run([*forks.torchrun(2), *command], timeout=240, **ENVIRONMENT)
    assert done.returncode == 1, done.stderr
    statuses = re.findall(r"rank +: (\d+) \(local_rank.*\n +exitcode +: (-?\d+)", done.stderr)
    return {int(rank): int(status) for rank, status in statuses}, done.stderr


def by_themselves(world, ending, **environment):
    """Run job_worker.py without a launcher, each rank ends by itself → (exit statuses by
    rank, output, error).
    """
    jobs = forks.ranks(world, [WORKER, ending], **ENVIRONMENT, **environment)
    try:
        output, error = map("".join, zip(*(job.communicate(timeout=240) for job in jobs)))
    finally:
        forks.kill(*jobs)
    return {rank: job.returncode for rank, job in enumerate(jobs)}, output, error


def root_cause(error):
    return re.search(r"Root Cause.*?rank +: (\d+).*?exitcode +: (-?\d+)", error, re.S).groups()


@pytest.mark.parametrize("world, task, nodes", [(3, "exchange", {}), (4, "turns", dict(a_node=2))])
def test_what_ranks_exchange_and_who_downloads_first(world, task, nodes):
    statuses, output, error = by_themselves(world, task, **nodes)
    assert set(statuses.values()) == {0}, error
    assert output == "exchanged\n" * (task == "exchange")  # rank 0 alone prints, and gloo nothing


def test_steps_of_neighbouring_jobs_have_ports_of_their_own(monkeypatch):
    ports = set()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for job in range(41, 44):
        for step in range(16):
            monkeypatch.delenv("MASTER_PORT", raising=False)
            monkeypatch.setenv("SLURM_JOB_ID", str(job))
            monkeypatch.setenv("SLURM_STEP_ID", str(step))
            launched.set_address()
            ports.add(int(os.environ["MASTER_PORT"]))
    # below those of outgoing connections
    assert len(ports) == 3 * 16 and min(ports) >= 12000 and max(ports) < 32000


@pytest.mark.parametrize(
    "ending, line",
    [
        ("on_one", r"rank 1 on \S+: --ckpt x: no such file"),
        ("on_all", "--vae x: no such folder"),
        (
            "on_two",
            r"rank 1 on \S+: --ckpt 1: no such file\n"
            r"job_worker.py: rank 2 on \S+: --ckpt 2: no such file",
        ),
        ("alone", "--sample-dir: No space left on device"),
    ],
)
def test_a_mistake_on_any_rank_ends_all_with_one_line(ending, line):
    statuses, _, error = by_themselves(3, ending)
    assert re.fullmatch(f"job_worker.py: {line}\n", error), error
    assert set(statuses.values()) == {USAGE}


@pytest.mark.parametrize(
    "command, cause",
    [
        ([WORKER, "stopped"], "job_worker.py: stopped; start again"),
        (
            ["sample_ddp.py", "--sample-dir", "x"],
            "sample_ddp.py: --sample-dir: is for an FID job.*",
        ),
    ],
)
def test_torchruns_summary_says_why(command, cause):
    """A mistake is a line before torchrun's own forty and the root cause in them. It is
    no crash.
    """
    _, error = under_torchrun(*command)
    own, _, summary = error.partition("Root Cause")
    assert (
        re.search(f"traceback : {cause}$", summary, re.M)
        and len(re.findall(f"^{cause}$", own, re.M)) == 1
    ), error
    assert root_cause(error)[1] == str(STOPPED if "stopped" in cause else USAGE)
    assert "Error:" not in own.partition("ChildFailedError")[0], error


def test_the_failing_ranks_traceback_comes_first():
    """It is torchrun's root cause too; what the others meet because of it is a line each."""
    _, error = under_torchrun(WORKER, "crash")
    first = error.index("Traceback")
    own = error.partition("ChildFailedError")[0]
    assert re.search(r"rank 1 of 2 on \S+:\n$", error[:first])
    assert "ZeroDivisionError: of rank 1" in error[first:].split("\n\n")[0]
    others = re.findall(r"^rank (\d): \w+Error.*\(after rank (\d) failed\)$", own, re.M)
    assert set(others) <= {("0", "1")}
    assert root_cause(error) == ("1", "1")
    assert "ZeroDivisionError: of rank 1" in error[error.index("Root Cause") :]


def test_a_job_whose_rank_died_is_started_again_by_torchrun():
    done = forks.run(
        [*forks.torchrun(2, "--standalone", "--max-restarts=1"), WORKER, "killed"], **ENVIRONMENT
    )
    assert (done.returncode, done.stdout) == (0, "exchanged\n"), done.stderr


def test_a_job_that_stops_on_rank_0():
    statuses, error = under_torchrun(WORKER, "stopped_on_0")
    assert statuses[0] == STOPPED and statuses.get(1, 0) in (0, STOPPED), error
    by_rank = error.partition("ChildFailedError")[0]  # whose summary has it too
    assert by_rank.count("job_worker.py: stopped; start again") == 1


def test_ranks_with_different_latents_fail():
    statuses, _, error = by_themselves(3, "different")
    assert set(statuses.values()) == {1} and re.search(
        r"different latents \(checksums \w{8}, \w{8}, \w{8}\)", error
    )


def test_all_ranks_of_a_grid_decode_in_one_arithmetic(tiny_vae):
    statuses, output, error = by_themselves(3, "decode", VAE=str(tiny_vae))
    assert set(statuses.values()) == {0} and output == "one arithmetic\n", error
    assert "fails in float16 on a rank: all ranks decode in fp32" in error


def test_ranks_that_do_not_all_start():
    """Begun by hand, without the others: a bounded wait, a line meanwhile and one at its end."""
    started = forks.ranks(3, [WORKER, "exchange", 2], started=2, **ENVIRONMENT)
    for rank, process in enumerate(started):
        error = process.communicate(timeout=240)[1]
        assert process.returncode == USAGE and "Traceback" not in error
        assert f"rank {rank} of 3: waits for the other 2 to connect at 127.0.0.1:" in error
        line = (
            rf"job_worker.py: rank {rank} of 3: cannot connect at 127.0.0.1:\d+; start all ranks \("
        )
        assert re.match(line, error.splitlines()[-1]), error


def test_a_signal_inside_the_handler_of_another_does_not_lock():
    """A launcher and a queue both ask: the second comes while the first is being
    noted, wherever that is.
    """
    ranks = Ranks()
    met = []

    def again(frame, event, _):
        if len(met) < 50 and event == "line" and frame.f_code.co_name == "_on_signal":
            met.append(event)
            signal.raise_signal(signal.SIGUSR1)
        return again

    before = signal.getsignal(signal.SIGUSR1)
    try:
        ranks.stop_on_signals(signal.SIGUSR1)
        assert not ranks.stopping
        sys.settrace(again)
        signal.raise_signal(signal.SIGUSR1)
        sys.settrace(None)
        assert met and ranks.stopping
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("rank", (0, 1))
def test_srun_without_scontrol(rank, here, tmp_path, monkeypatch):
    """In a container without scontrol, rank 0 asks for MASTER_ADDR."""
    own = (
        f"SLURM_STEP_NUM_TASKS=2 SLURM_PROCID={rank} SLURM_LOCALID={rank} SLURM_JOB_ID=7 "
        "SLURM_STEP_ID=0"
    )
    step = dict(
        one.split("=") for one in f"{own} SLURM_STEP_NODELIST=n[1-2] PATH={tmp_path}".split()
    )
    monkeypatch.setattr(os, "environ", step)
    done = here("sample_ddp.py", "--model", "DiT-Demo/2")
    assert done.returncode == USAGE and done.stderr.count("\n") == 1 - rank
    assert rank or ("sample_ddp.py: srun: " in done.stderr and "export MASTER_ADDR" in done.stderr)
