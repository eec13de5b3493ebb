"""sample_ddp.py in real processes that talk over gloo: one grid, equal to one process, killed, misled."""

import os
import re
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, fill
from PIL import Image
from safetensors.torch import save_file

from accel.parallel.rows import share
from models import DiT_models

CUDA = torch.cuda.is_available()
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "demo.safetensors"
    save_file(fill(DiT_models["DiT-Demo/2"]()).state_dict(), path)
    return path


@pytest.fixture(scope="module")
def demo(weights, tiny_vae):
    return ["--model", "DiT-Demo/2", "--ckpt", str(weights), "--vae", str(tiny_vae), "--device", "cpu"]


def torchrun(processes, *args, launch=("--standalone",), cwd=ROOT, **how):
    """torchrun as a child in a process group of its own."""
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *launch,
            f"--nproc_per_node={processes}",
            str(ROOT / "sample_ddp.py"),
            *map(str, args),
        ],
        cwd=cwd,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        **how,
    )


def ranks(world, *args, output=subprocess.PIPE, cwd=ROOT):
    """The ranks themselves, without a launcher that would look after them."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    return [
        subprocess.Popen(
            [sys.executable, str(ROOT / "sample_ddp.py"), *map(str, args)],
            cwd=cwd,
            text=True,
            stdout=output,
            stderr=output,
            env={
                **ENVIRONMENT,
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
        )
        for rank in range(world)
    ]


def finish(*processes, status=0, seconds=120):
    """Their standard output and error, joined; every status must be `status`."""
    texts, deadline = [], time.monotonic() + seconds
    try:
        for process in processes:
            texts += process.communicate(timeout=max(1, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    text = "\n".join(filter(None, texts))
    assert [process.returncode for process in processes] == [status] * len(processes), text
    return text


#################################################################################
#                                    One grid                                   #
#################################################################################


def test_shares_cover_all_rows_once_and_evenly():
    for n in range(1, 12):
        for world in range(1, 9):
            parts = [list(range(n))[share(n, world, rank)] for rank in range(world)]
            assert sum(parts, []) == list(range(n))
            sizes = [len(part) for part in parts]
            assert max(sizes) - min(sizes) <= 1 and sizes[0] == max(sizes)


@pytest.fixture(scope="module")
def alone(demo, tmp_path_factory):
    """Latents of sample.py for five labels, and for one."""
    folder = tmp_path_factory.mktemp("alone")
    for labels in ("1 2 3 4 5", "6"):
        subprocess.run(
            [
                sys.executable,
                ROOT / "sample.py",
                *demo,
                "--num-sampling-steps",
                "6",
                "--output-type",
                "latent",
                "--seed",
                "3",
                "--labels",
                *labels.split(),
                "--output",
                folder / f"{labels}.npy",
            ],
            check=True,
            env=ENVIRONMENT,
            capture_output=True,
        )
    return lambda labels: np.load(folder / f"{labels}.npy")


@pytest.mark.parametrize(
    "processes, labels, parallel",
    [(1, "1 2 3 4 5", "auto"), (3, "6", "rows=2"), (3, "1 2 3 4 5", "auto"), (4, "1 2 3 4 5", "auto")],
)
def test_grid_equals_one_process(processes, labels, parallel, demo, alone, tmp_path):
    """Pictures for ranks; or one picture, its rows for two, the third idle."""
    text = finish(
        torchrun(
            processes,
            *demo,
            "--num-sampling-steps",
            6,
            "--output-type",
            "latent",
            "--global-seed",
            3,
            "--labels",
            *labels.split(),
            "--parallel",
            parallel,
            "--output",
            tmp_path / "l.npy",
        )
    )
    assert ("parallel: rows=2, 2 of 3 GPUs: as told" in text) == (parallel != "auto")
    mine, expected = np.load(tmp_path / "l.npy"), alone(labels)
    assert np.abs(expected).max() > 0.5
    if processes == 1:
        assert np.array_equal(mine, expected)  # the same rows in the same matrix products
    # Fewer rows take another path through the CPU's matrix product, which adds in another order: float32 rounding, 1e-6 of the size.
    assert np.abs(mine - expected).max() <= 1e-5 * np.abs(expected).max()


def test_two_runs_give_one_picture(demo, tmp_path, monkeypatch):
    """One label on two ranks, as measured: which way is taken is kept, since two ways that take as long round differently. The second run draws the same bits."""
    monkeypatch.setitem(ENVIRONMENT, "XDG_CACHE_HOME", str(tmp_path))
    said = [
        finish(
            *ranks(
                2,
                *demo,
                "--num-sampling-steps",
                3,
                "--labels",
                6,
                "--output-type",
                "latent",
                "--output",
                tmp_path / f"{run}.npy",
            )
        )
        for run in "ab"
    ]
    first, second = (re.search(r"^parallel: (.*, \d of 2 GPUs): (.*)$", text, re.M) for text in said)
    assert (
        first[1] == second[1]
        and "measured before" not in first[2]
        and f"{first[2]}; measured before on this machine ({tmp_path}/dit/plans.json)" == second[2]
    )
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()


WHOLE_RUN = ["--model", "DiT-Demo/2", "--device", "cpu", "--labels", 2]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "one.png"
    subprocess.run(
        [sys.executable, "sample.py", *map(str, WHOLE_RUN), "--output", path],
        cwd=ROOT,
        check=True,
        env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"},
    )
    return np.asarray(Image.open(path))


@pytest.mark.parametrize("parallel", ["rows=2", "tokens=2,exchange=kv", "tokens=2,exchange=ring"])
def test_strict_gate_after_a_whole_run(parallel, one_process, tmp_path):
    """250 steps of the demo with its own weights, a picture on two ranks, against one process. (`ulysses` cannot share its three heads among two: test_sharded.py has it.)"""
    from evaluate import GATES, mae, psnr, ssim

    finish(*ranks(2, *WHOLE_RUN, "--parallel", parallel, "--output", tmp_path / "two.png"))
    two, bars = np.asarray(Image.open(tmp_path / "two.png")), GATES["strict"]
    assert one_process.std() > 10
    assert (
        mae(one_process, two) / 255 <= bars["mae"]
        and psnr(one_process, two) > bars["psnr"]
        and ssim(one_process, two) >= bars["ssim"]
    )


def test_rank_lost_with_tokens_on_its_gpu(demo, tmp_path):
    """Killed in the middle of a run in which every layer waits for it: the others end, without a launcher, and say why."""
    job = ranks(
        2,
        *demo,
        "--num-sampling-steps",
        1000,
        "--parallel",
        "tokens=2",
        "--labels",
        6,
        "--output-type",
        "latent",
        "--output",
        tmp_path / "l.npy",
    )
    begun = threading.Event()

    def listen():
        for line in job[0].stdout:
            if line.startswith("parallel:"):
                begun.set()

    threading.Thread(target=listen, daemon=True).start()
    assert begun.wait(60)
    time.sleep(1)
    job[1].kill()
    killed = time.monotonic()
    assert job[0].wait(60) == 1 and time.monotonic() - killed < 60
    assert "rank" in job[0].stderr.read() and not (tmp_path / "l.npy").exists()
    job[1].wait()


def test_two_nodes_and_both_ways_to_decode(demo, tmp_path, run):
    """Two agents on one host meet as two nodes would; the picture is sample.py's, whoever decodes."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = [*demo, "--num-sampling-steps", 4, "--labels", 1, 2, 3]
    meet = ["--nnodes=2", "--rdzv_backend=c10d", "--rdzv_id=test", f"--rdzv_endpoint=127.0.0.1:{port}"]
    nodes = [
        torchrun(1, *common, "--decode", "gather", "--output", tmp_path / "gather.png", launch=meet) for _ in range(2)
    ]
    assert "2 ranks" in finish(*nodes)
    finish(*ranks(2, *common, "--decode", "local", "--output", tmp_path / "local.png"))
    run("sample.py", *common, "--output", tmp_path / "one.png", OMP_NUM_THREADS="1")
    one, gather, local = (
        np.asarray(Image.open(tmp_path / f"{name}.png")).astype(int) for name in ("one", "gather", "local")
    )
    assert one.std() > 1 and np.array_equal(gather, local) and np.abs(one - gather).max() <= 1


#################################################################################
#                              Failure and bad input                            #
#################################################################################


def test_weights_missing_on_one_node_are_named_before_sampling(demo, weights, tmp_path):
    (tmp_path / "n0").mkdir()
    (tmp_path / "n1").mkdir()
    (tmp_path / "n0" / "w.safetensors").symlink_to(weights)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    demo = [*demo[:3], "w.safetensors", *demo[4:]]
    nodes = [
        torchrun(
            1,
            *demo,
            "--output",
            tmp_path / "x.png",
            cwd=tmp_path / f"n{i}",
            launch=["--nnodes=2", f"--node_rank={i}", "--master_addr=127.0.0.1", f"--master_port={port}"],
        )
        for i in range(2)
    ]
    text = finish(*nodes, status=1)  # torchrun's own status
    assert re.search(r"^sample_ddp.py: rank 1 on \S+: --ckpt w.safetensors: no such file", text, re.M)
    assert "exitcode  : 2" in text and "step/s" not in text and not (tmp_path / "x.png").exists()


@pytest.mark.skipif(CUDA, reason="there is a GPU")
def test_ranks_without_gpus_are_named(demo):
    text = finish(*ranks(2, *demo[:-1], "cuda"), status=2)
    assert re.search(r"ranks 0, 1 on \S+: no GPU there; .*--device cpu", text) and text.count("no GPU") == 1


@pytest.mark.parametrize(
    "args, words",
    [
        (["--labels", "1", "--num-fid-samples", "9"], "--labels: has no meaning with --num-fid-samples"),
        (["--decode", "gather", "--num-fid-samples", "9"], "--decode: has no meaning with --num-fid-samples"),
        (["--sample-dir", "here"], "--sample-dir: is for the folder of an FID job"),
        (["--per-proc-batch-size", "4"], "--per-proc-batch-size: is for the folder"),
        (["--tf32", "--precision", "fp32"], "--tf32: conflicts with --precision fp32"),
        (["--per-proc-batch-size", "0"], "--per-proc-batch-size: 0: must be at least 1"),
        (["--world-independent-noise"], "--world-independent-noise: a grid is the same"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(args, words, demo):
    text = finish(*ranks(1, *demo, *args), status=2)
    assert (
        words in text
        and "Traceback" not in text
        and len([line for line in text.splitlines() if "sample_ddp.py" in line]) == 1
    )
    assert "128 px" not in text  # nothing has been loaded
