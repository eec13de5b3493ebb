"""The batch files through a real Slurm of two nodes: submitted, run, signalled, requeued,
waited for.
"""

import contextlib
import hashlib
import json
import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cluster import Cluster, missing
from conftest import ROOT
from forks import until
from PIL import Image

from accel.errors import USAGE

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=f"no Slurm can be started: {missing()}"),
    pytest.mark.timeout(240),
]
STEPS = "--num-sampling-steps", "4"


@pytest.fixture(scope="module")
def cluster():
    with Cluster(nodes=2) as cluster:
        yield cluster


@pytest.fixture
def install(tmp_path):
    """A folder that looks like the repository to the batch files."""
    folder = tmp_path / "the install"
    binaries = folder / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name in ["sample.py", "sample_ddp.py", "evaluate.py", "accel", "bench", "scripts", "slurm"]:
        (folder / name).symlink_to(ROOT / name)
    (binaries / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    (binaries / "torchrun").write_text(
        f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    )
    for program in binaries.iterdir():
        program.chmod(0o755)
    return folder


@pytest.fixture
def work(tmp_path):
    """The folder where a user submits."""
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.mark.parametrize(
    "ending, status, words",
    [
        ("on_one", USAGE, "--ckpt x: no such file"),
        ("killed", 128 + signal.SIGKILL, "task 1: Killed"),
    ],
)
def test_a_step_of_srun_ends_with_the_status_of_its_ranks(ending, status, words, cluster):
    """A rank on each of two nodes, without torchrun, end within a minute:
    tests/distributed/job_worker.py.
    """
    worker = ROOT / "tests" / "distributed" / "job_worker.py"
    done = subprocess.run(
        [
            "srun",
            "--nodes=2",
            "--ntasks=2",
            "--kill-on-bad-exit=1",
            sys.executable,
            str(worker),
            ending,
        ],
        env={**cluster.env, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    said = done.stdout + done.stderr
    assert done.returncode == status and said.count(words) == 1, said


def log_of(work, job):
    return "\n".join(file.read_text() for file in work.glob(f"*-{job}.out"))


def finish(cluster, work, job, seconds=120):
    state = cluster.wait_for(
        job, {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}, seconds
    )
    assert state == "COMPLETED", log_of(work, job)


def picture(work, job):
    return np.asarray(Image.open(work / "output" / f"job_{job}" / "sample.png")).astype(int)


def test_pictures_on_one_gpu_four_gpus_and_two_nodes_are_one_picture(cluster, install, work, demo):
    """Four files submitted at once, and the comparison of two, which waits for both;
    Slurm decides what runs when. All is written into the folder of submission.
    """
    (install / "evaluate.py").unlink()  # the verdict is tested elsewhere
    (install / "evaluate.py").write_text(
        "import os, sys; print([open(p, 'rb').read(4) for p in sys.argv[1:]], file=sys.stderr)\n"
        f"print('writable' if os.access({str(ROOT)!r}, os.W_OK) else 'read-only')\n"
    )
    slurm = install / "slurm"
    before = {*install.rglob("*")}
    ids = [
        cluster.submit(slurm / f"{name}.sbatch", *demo, *STEPS, cwd=work)
        for name in ("baseline_1gpu", "sample_1gpu", "sample_4gpu")
    ]
    small = "--gres=gpu:1", "--ntasks-per-node=1", "--cpus-per-task=2"
    ids.append(cluster.submit(*small, slurm / "sample_multinode.sbatch", *demo, *STEPS, cwd=work))
    assert cluster.fact(ids[2], "TresPerNode") == "gres:gpu:4" and cluster.fact(
        ids[3], "NumNodes"
    ).startswith("2")
    two = (f"output/job_{job}/sample.png" for job in ids[:2])
    verdict = cluster.submit(
        f"--dependency=afterok:{ids[0]}:{ids[1]}", slurm / "evaluate.sbatch", *two, cwd=work
    )
    assert (
        cluster.state(verdict) == "PENDING"
        and cluster.fact(verdict, "Dependency").count("unfulfilled") == 2
    )
    for job in (*ids, verdict):
        finish(cluster, work, job)
    text = (work / "output" / f"job_{verdict}" / "verdict.txt").read_text()
    assert text.count("PNG") == 2
    assert "read-only" in text or not cluster.read_only
    assert {*install.rglob("*")} == before
    baseline, *others = [picture(work, job) for job in ids]
    assert baseline.std() > 1 and np.array_equal(baseline, others[0])
    # A row's bits depend on how many rows the processor's GEMM has, by float32 rounding.
    assert all(np.abs(baseline - other).max() <= 1 for other in others)
    assert "4 ranks" in log_of(work, ids[2]) and "2 ranks" in log_of(work, ids[3])
    assert "Traceback" not in log_of(work, ids[3])


@pytest.mark.timeout(900)
def test_all_measurements_in_a_job(cluster, install, work, demo):
    """It is submitted from another folder. Four files are there; the contest's job by two ranks and
    the layouts are measured. The pictures lie next to the records that name them.
    """
    folder = install / "log/mine"
    folder.mkdir(parents=True)
    for name in ("contest-1", "ladder", "label-1", "label-2"):
        (folder / f"{name}.json").write_text('{"tier": "fp32"}')
    place = "--gres=gpu:2", install / "slurm" / "measure.sbatch"
    flags = "--load", "0", "--window", "0.1", "--num-sampling-steps", "2"
    model = [word for word in demo if word not in ("--device", "cpu")]
    job = cluster.submit(*place, "log/mine", *model, *flags, cwd=work)
    finish(cluster, work, job, 400)
    record = json.loads((folder / "contest-2.json").read_text())
    [row] = record["contest"]
    assert record["gpus"] == 2 and "2 ranks" in row["settings"]
    [grid] = row["grids"]
    assert hashlib.sha256((folder / grid["file"]).read_bytes()).hexdigest() == grid["picture"]
    assert '"grids": ' in log_of(work, job) and log_of(work, job).count(" is there") == 4
    assert (folder / "layouts.json").exists()


def failed(cluster, work, job):
    """The lines that a job left which failed with status 2."""
    assert (
        cluster.wait_for(job, {"FAILED", "COMPLETED"}, 120) == "FAILED"
        and cluster.fact(job, "ExitCode") == "2:0"
    )
    return log_of(work, job).splitlines()


FILES = [file.name for file in sorted((ROOT / "slurm").glob("*.sbatch"))]


def test_without_an_environment_or_gpus(cluster, install, work):
    """One line says that there is neither a .venv nor another python with torch, or no GPU."""
    without_gpu = {
        name: cluster.submit("--gres=none", "--nodes=1", install / "slurm" / name, cwd=work)
        for name in FILES
        if name != "evaluate.sbatch"
    }
    for name, job in without_gpu.items():
        [line] = failed(cluster, work, job)
        assert "this job has no GPU: submit it with --gres=gpu:4" in line, name
    (install / ".venv").rename(install / "elsewhere")
    small = "--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=1"
    bare = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    for name, job in {
        name: cluster.submit(*small, install / "slurm" / name, cwd=work, env=bare) for name in FILES
    }.items():
        [line] = failed(cluster, work, job)
        assert f"{install} has no .venv (its owner: make .venv/ready)" in line, name


def test_a_copied_batch_file_needs_the_name_of_the_repository(cluster, install, work, demo):
    """Users who may not edit the install edit a copy."""
    copy = Path(shutil.copy(install / "slurm" / "sample_1gpu.sbatch", work))
    line = failed(cluster, work, cluster.submit(copy, cwd=work))[-1]
    assert line.startswith("slurm: the repository is not found: export DIT=FOLDER, where")
    arguments = *demo, *STEPS, "--labels", "1"
    finish(cluster, work, cluster.submit(copy, *arguments, cwd=work, env={"DIT": str(install)}))


FID = "--num-fid-samples", "24", "--per-proc-batch-size", "2", "--num-sampling-steps", "25"


def wait_for_pictures(work, job, count, seconds=200):
    made = lambda: list((work / "output").glob(f"job_{job}/*/*.png"))
    until(lambda: len(made()) >= count, seconds, lambda: log_of(work, job))


def requeued(cluster, work, job, restarts, seconds=200):
    """Wait until the job has put itself back in the queue, and spare the test Slurm's two
    minutes of patience.
    """
    until(
        lambda: int(cluster.fact(job, "Restarts")) >= restarts and cluster.state(job) == "PENDING",
        seconds,
        lambda: cluster.state(job) + log_of(work, job),
        pause=0.2,
    )
    # Not at once: within the second of its requeue a job's credential still counts as
    # revoked.
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")


def test_fid_job_survives_what_a_queue_does_to_it(cluster, install, work, demo):
    """Disturb one job three times. Its user requeues it after scancel. It requeues itself after
    the warning before the time limit, and after SIGTERM to its ranks, as in preemption. It ends
    with all its files; their bits: tests/jobs/fid/test_fid_job.py. A job that may not be
    requeued fails by its ranks' status.
    """
    size = "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1"
    file = install / "slurm" / "fid50k.sbatch"
    once = cluster.submit("--no-requeue", *size, file, *demo, *FID, cwd=work)
    wait_for_pictures(work, once, 2)
    cluster.run("scancel", "--signal=USR1", once)
    assert cluster.wait_for(once, {"FAILED"}, 60) and cluster.fact(once, "ExitCode") == "75:0"
    job = cluster.submit(*size, file, *demo, *FID, cwd=work)
    for restart, how in enumerate(([], ["--batch", "--signal=USR1"], ["--signal=TERM"]), start=1):
        cluster.wait_for(job, {"RUNNING"}, 200)
        made = len(list((work / "output").glob(f"job_{job}/*/*.png")))
        wait_for_pictures(work, job, made + 2)
        cluster.run("scancel", *how, job)
        if not how:
            assert cluster.wait_for(job, {"CANCELLED", "PENDING"}, 60) == "CANCELLED"
            cluster.run("scontrol", "requeue", job)
        requeued(cluster, work, job, restart)
        assert log_of(work, job).count("start again with the same command") == restart
        assert not list((work / "output").glob(f"job_{job}/*.npz"))
    finish(cluster, work, job)
    [archive] = (work / "output" / f"job_{job}").glob("*.npz")
    assert len(np.load(archive)["arr_0"]) == 24 == len([*archive.with_suffix("").glob("*.png")])
    assert int(cluster.fact(job, "Restarts")) == 3


def test_a_command_in_an_interactive_step_is_one_process(cluster, demo, tmp_path):
    """A step of srun --pty runs one of its tasks; a step that is started there runs all."""
    how = [*demo, *STEPS, "--labels", "1", "2", "--output"]
    alone = [sys.executable, str(ROOT / "sample_ddp.py"), *how, str(tmp_path / "alone.png")]
    ranks = [sys.executable, str(ROOT / "sample_ddp.py"), *how, str(tmp_path / "ranks.png")]
    line = f"{shlex.join(alone)}; srun -n2 --overlap {shlex.join(ranks)}"
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["srun", "-n4", "--pty", "bash", "--norc"],
        env={**cluster.env, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        start_new_session=True,
    )
    os.write(ours, f"{line}; exit\n".encode())
    os.set_blocking(ours, False)
    text = b""
    ended = False
    deadline = time.monotonic() + 90
    while not ended:
        assert time.monotonic() < deadline, text.decode()
        ended = process.poll() is not None
        with contextlib.suppress(BlockingIOError):
            text += os.read(ours, 65536)
        time.sleep(0.05)
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 0 and text.count(b" 2 ranks") == 1, text.decode()
    one, two = (
        np.asarray(Image.open(tmp_path / name)).astype(int) for name in ("alone.png", "ranks.png")
    )
    assert one.std() > 1 and np.abs(one - two).max() <= 1
