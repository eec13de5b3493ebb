"""sample_ddp.py on GPUs, over NCCL: as many ranks as there are GPUs."""

import os
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from forks import until
from jobs import finish, ranks_of, start, wait_for_pictures
from jobs import run as run_job

from accel.errors import USAGE

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]
GPUS = torch.cuda.device_count()
LATENT = ["--output-type", "latent"]


@pytest.fixture
def demo(demo):
    """The shared flags without their last, --device cpu."""
    return demo[:-2]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_grid_equals_one_process(precision, demo, tmp_path, run):
    """There is one label more than ranks. In half precision fewer rows may take another
    GEMM, which rounds differently.
    """
    labels = [i % 8 for i in range(GPUS + 1)]
    common = [
        *demo,
        "--precision",
        precision,
        *LATENT,
        "--num-sampling-steps",
        20,
        "--labels",
        *labels,
    ]
    run_job(GPUS, *common, "--output", tmp_path / "many.npy")
    assert run("sample.py", *common, "--output", tmp_path / "one.npy").returncode == 0
    many = np.load(tmp_path / "many.npy")
    one = np.load(tmp_path / "one.npy")
    bound = 1e-4 if precision == "fp32" else 2e-2
    assert np.abs(one).max() > 0.5 and np.abs(many - one).max() <= bound * np.abs(one).max()


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("parallel", ["rows=2", "tokens=2", "auto"])
def test_one_picture_on_two_gpus(parallel, demo, tmp_path, run):
    """Captured graphs in half precision make one process's picture, and the same bits again."""
    common = [*demo, "--precision", "fp16", *LATENT, "--num-sampling-steps", 50, "--labels", 3]
    for name in ("two", "again"):
        text = run_job(2, *common, "--parallel", parallel, "--output", tmp_path / f"{name}.npy")
        assert "parallel: " in text
    assert run("sample.py", *common, "--output", tmp_path / "one.npy").returncode == 0
    two, again, one = (np.load(tmp_path / f"{name}.npy") for name in ("two", "again", "one"))
    assert np.abs(one).max() > 0.5 and np.array_equal(two, again)
    assert np.abs(two - one).max() <= 2e-2 * np.abs(one).max()


def test_killed_fid_job_ends_with_the_same_bits(demo, tmp_path):
    """All ranks killed twice. Its GEMMs are those of the calm job, as they are when a job
    is started again.
    """
    how = ["--num-fid-samples", 64 * GPUS, "--per-proc-batch-size", 4, "--num-sampling-steps", 100]
    command = [*demo, *how, "--sample-dir"]
    run_job(GPUS, *command, tmp_path / "calm")
    calm = next(path for path in (tmp_path / "calm").iterdir() if path.is_dir())
    killed = tmp_path / "killed" / calm.name
    (killed / ".job").mkdir(parents=True)
    for choice in set((calm / ".job").glob("*.json")) - {calm / ".job" / "settings.json"}:
        shutil.copy(choice, killed / ".job")
    for least in (4, 24):
        job = start(GPUS, *command, tmp_path / "killed")
        assert wait_for_pictures(tmp_path / "killed", least * GPUS, job, seconds=120)
        for rank in ranks_of(job):
            os.kill(rank, signal.SIGKILL)
        finish(job, status=-signal.SIGKILL)
        assert len(list(killed.glob("*.png"))) < 64 * GPUS
    run_job(GPUS, *command, tmp_path / "killed")
    for file in [*sorted(calm.glob("*.png")), calm.with_name(calm.name + ".npz")]:
        assert (
            file.read_bytes()
            == (tmp_path / "killed" / file.relative_to(tmp_path / "calm")).read_bytes()
        ), file.name


def test_two_ranks_on_one_gpu_are_named(demo):
    """One process more than there are GPUs."""
    text = run_job(GPUS + 1, *demo, status=USAGE)
    assert "several ranks on one GPU" in text and " steps · " not in text


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_the_last_exchange_leaves_no_process_behind(demo, tmp_path):
    """NCCL waits for CUDA graphs that hold its kernels; the job ends soon after its
    picture is there all the same.
    """
    output = tmp_path / "l.npy"
    how = ["--precision", "fp32", "--parallel", "rows=2", "--labels", 3, "--num-sampling-steps", 20]
    job = start(2, *demo, *how, *LATENT, "--output", output)
    until(lambda: output.exists() or job.poll() is not None, 120)
    assert output.exists()
    finish(job)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_a_rank_lost_in_a_captured_step(demo, tmp_path):
    """The other waits for it in a kernel of NCCL's, which no exception interrupts: the
    launcher ends it.
    """
    how = [
        "--parallel",
        "tokens=2",
        "--labels",
        3,
        "--num-sampling-steps",
        1000,
        "--seeds",
        *range(200),
    ]
    job = start(2, *demo, *how, *LATENT, "--output", tmp_path / "l.npy")
    job.wait_for("parallel:")
    time.sleep(10)
    os.kill(ranks_of(job)[1], signal.SIGKILL)
    finish(job, status=-signal.SIGKILL)
    assert not (tmp_path / "l.npy").exists()
