"""sample_ddp.py in real processes over gloo: equal to one process, killed, stopped, misled. FID's folder: tests/fid."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, fill
from PIL import Image
from safetensors.torch import save_file

from accel.errors import STOPPED, USAGE
from accel.parallel.rows import share
from models import DiT_models

CUDA = torch.cuda.is_available()
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def demo(tmp_path_factory, tiny_vae):
    path = tmp_path_factory.mktemp("weights") / "demo.safetensors"
    save_file(fill(DiT_models["DiT-Demo/2"]()).state_dict(), path)
    return ["--model", "DiT-Demo/2", "--ckpt", str(path), "--vae", str(tiny_vae), "--device", "cpu"]


def start(world, *args, launch=("--standalone",), script="sample_ddp.py", cwd=ROOT, **environment):
    """torchrun with so many ranks on this host."""
    launcher = ["-m", "torch.distributed.run", *launch, f"--nproc_per_node={world}"]
    return subprocess.Popen(
        [sys.executable, *launcher, str(ROOT / script), *map(str, args)],
        cwd=cwd,
        env={**ENVIRONMENT, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def finish(*processes, status=0, seconds=120):
    """Their standard output and error. A launcher ends with 1 for every failure, and prints what the rank left with."""
    texts, deadline = [], time.monotonic() + seconds
    try:
        for process in processes:
            texts += process.communicate(timeout=max(1, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    text = "\n".join(filter(None, texts))
    assert [process.returncode for process in processes] == [int(status != 0)] * len(processes), text
    assert not status or f"exitcode  : {status}" in text, text
    return text


def run(world, *args, **how):
    return finish(start(world, *args, **how))


def ranks_of(launcher):
    """Process id by rank."""
    found = {}
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(launcher.pid)], capture_output=True, text=True).stdout
    for process in map(int, children.split()):
        environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        rank = next((entry[5:] for entry in environment if entry.startswith(b"RANK=")), None)
        if rank is not None:
            found[int(rank)] = process
    return found


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def latents(folder, name):
    return np.load(folder / f"{name}.npy")


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
            assert not range(n)[share(n, world, world)]  # a rank too many


@pytest.fixture(scope="module")
def alone(demo, tmp_path_factory):
    """Latents of sample.py for five labels, and for one."""
    folder = tmp_path_factory.mktemp("alone")
    common = [*demo, "--num-sampling-steps", "6", "--output-type", "latent", "--seed", "3"]
    for labels in ("1 2 3 4 5", "6"):
        command = [*common, "--labels", *labels.split(), "--output", folder / f"{labels}.npy"]
        subprocess.run([sys.executable, ROOT / "sample.py", *command], check=True, env=ENVIRONMENT, capture_output=True)
    return lambda labels: latents(folder, labels)


@pytest.mark.parametrize(
    "world, labels, parallel",
    [(1, "1 2 3 4 5", "auto"), (3, "1 2 3 4 5", "auto"), (3, "6", "off"), (3, "6", "rows=2"), (3, "6", "weights=3")],
)
def test_grid_equals_one_process(world, labels, parallel, demo, alone, tmp_path):
    """Pictures for ranks; or one picture: on one rank, its batch rows on two, every layer divided over all three."""
    common = [*demo, "--num-sampling-steps", 6, "--output-type", "latent", "--global-seed", 3]
    text = run(world, *common, "--labels", *labels.split(), "--parallel", parallel, "--output", tmp_path / "l.npy")
    if "=" in parallel:
        assert f"parallel: {parallel}, {parallel[-1]} of 3 GPUs: given by --parallel" in text
    mine, expected = latents(tmp_path, "l"), alone(labels)
    assert np.abs(expected).max() > 0.5
    if world == 1 or parallel == "off":
        assert np.array_equal(mine, expected)  # the same rows in the same GEMMs
    # Fewer rows take another path through the CPU's GEMM, which adds in another order: float32 rounding.
    assert np.abs(mine - expected).max() <= 1e-5 * np.abs(expected).max()


def test_two_runs_give_one_picture(demo, tmp_path):
    """One label on two ranks: the layout that was chosen is kept, since two that take as long round differently."""
    common = [*demo, "--num-sampling-steps", 3, "--labels", 6, "--output-type", "latent"]
    texts = [run(2, *common, "--output", tmp_path / f"{name}.npy", XDG_CACHE_HOME=str(tmp_path)) for name in "ab"]
    first, second = (re.search(r"^parallel: (.*, \d of 2 GPUs): (.*)$", text, re.M) for text in texts)
    assert first[1] == second[1] and "measured before" not in first[2]
    assert f"{first[2]}; measured before on this machine ({tmp_path}/dit/plans.json)" == second[2]
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()


WHOLE_RUN = ["--model", "DiT-Demo/2", "--device", "cpu", "--labels", 2]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "one.png"
    command = [sys.executable, "sample.py", *map(str, WHOLE_RUN), "--output", path]
    subprocess.run(command, cwd=ROOT, check=True, env=ENVIRONMENT)
    return np.asarray(Image.open(path))


@pytest.mark.parametrize("parallel", ["rows=2", "tokens=2,exchange=kv"])
def test_strict_gate_after_a_whole_run(parallel, one_process, tmp_path):
    """250 steps of the demo with its own weights against one process. (`ulysses`, on two ranks, does not divide its
    three heads: test_sharded.py has it.)"""
    from evaluate import GATES, mae, psnr, ssim

    run(2, *WHOLE_RUN, "--parallel", parallel, "--output", tmp_path / "many.png")
    many, strict = np.asarray(Image.open(tmp_path / "many.png")), GATES["strict"]
    assert one_process.std() > 10
    assert mae(one_process, many) / 255 <= strict["mae"] and psnr(one_process, many) > strict["psnr"]
    assert ssim(one_process, many) >= strict["ssim"]


def test_a_rank_lost_with_tokens_on_its_gpu(demo, tmp_path):
    """Killed in the middle of a run in which every layer waits for it."""
    common = [*demo, "--num-sampling-steps", 1000, "--parallel", "tokens=2", "--labels", 6, "--output-type", "latent"]
    job = start(2, *common, "--output", tmp_path / "l.npy")
    begun = threading.Event()

    def listen():
        for line in job.stdout:
            if line.startswith("parallel:"):
                begun.set()

    listener = threading.Thread(target=listen)
    listener.start()
    assert begun.wait(60)
    time.sleep(1)
    os.kill(ranks_of(job)[1], signal.SIGKILL)
    killed = time.monotonic()
    assert job.wait(60) == 1 and time.monotonic() - killed < 60
    listener.join()
    assert re.search(r"Root Cause.*rank +: 1 .*SIGKILL", job.stderr.read(), re.S) and not (tmp_path / "l.npy").exists()


def test_two_nodes_and_both_ways_to_decode(demo, tmp_path):
    """Two agents on one host connect as two nodes would; the picture is sample.py's, whoever decodes."""
    common = [*demo, "--num-sampling-steps", 4, "--labels", 1, 2, 3]
    launch = ["--nnodes=2", "--rdzv_backend=c10d", "--rdzv_id=test", f"--rdzv_endpoint=127.0.0.1:{free_port()}"]
    output = {name: tmp_path / f"{name}.png" for name in ("one", "gather", "local")}
    gather = [*common, "--decode", "gather", "--output", output["gather"]]
    assert "2 ranks" in finish(*(start(1, *gather, launch=launch) for _ in range(2)))
    run(2, *common, "--decode", "local", "--output", output["local"])
    command = [sys.executable, "sample.py", *map(str, common), "--output", output["one"]]
    subprocess.run(command, cwd=ROOT, check=True, env=ENVIRONMENT)
    one, gather, local = (np.asarray(Image.open(path)).astype(int) for path in output.values())
    assert one.std() > 1 and np.array_equal(gather, local) and np.abs(one - gather).max() <= 1


#################################################################################
#                            Ranks that are stopped                             #
#################################################################################

FID = ["--num-fid-samples", 42, "--per-proc-batch-size", 2, "--num-sampling-steps", 20]


@pytest.mark.parametrize(
    "world, args, rows",
    [
        (4, ["--labels", *range(8)], 4),
        (3, ["--labels", 1, 2, "--parallel", "rows=2,tokens=1"], 2),
        (2, ["--num-fid-samples", 12, "--per-proc-batch-size", 3, "--cfg-scale", 1.5], 6),
        (2, ["--num-fid-samples", 12, "--per-proc-batch-size", 3, "--cfg-scale", 1], 3),
    ],
)
def test_the_engine_is_prepared_for_what_a_rank_evaluates(world, args, rows, demo, tmp_path):
    """A rank with two of eight labels evaluates four batch rows, not sixteen; an FID batch of three six, or three."""
    output = ["--sample-dir", tmp_path] if "--num-fid-samples" in args else ["--output", tmp_path / "x.png"]
    common = [*demo, "--num-sampling-steps", 2, *args, *output]
    run(world, *common, script="tests/distributed/shapes_worker.py", FOUND=str(tmp_path))
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    busy = 2 if "rows=2,tokens=1" in args else world
    assert [rank["prepared"] for rank in found] == [rows] * world
    assert [rank["evaluated"] for rank in found] == [[rows]] * busy + [[]] * (world - busy)


def wait_for_pictures(folder, count, seconds=60):
    deadline = time.monotonic() + seconds
    while len(list(Path(folder).glob("*/*.png"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number, victim", [(signal.SIGUSR1, 1), (signal.SIGTERM, 0)])
def test_a_signal_to_one_rank_stops_all(number, victim, demo, tmp_path):
    job = start(2, *demo, *FID, "--sample-dir", tmp_path)
    wait_for_pictures(tmp_path, 2)
    os.kill(ranks_of(job)[victim], number)
    text = finish(job, status=STOPPED)
    assert text.count("start again with the same command") == 1 and not list(tmp_path.glob("*.npz"))
    assert len(re.findall(f"exitcode  : {STOPPED}", text)) == 2


def test_a_lost_rank_of_an_fid_job(demo, tmp_path):
    """Killed while the other is at work, which takes the launcher's SIGTERM for a request to stop."""
    job = start(2, *demo, *FID, "--num-fid-samples", 4000, "--sample-dir", tmp_path)
    wait_for_pictures(tmp_path, 2)
    os.kill(ranks_of(job)[1], signal.SIGKILL)
    killed = time.monotonic()
    text = finish(job, status=-signal.SIGKILL)
    assert time.monotonic() - killed < 60 and re.search(r"Root Cause.*rank +: 1 .*SIGKILL", text, re.S)


#################################################################################
#                              Failure and bad input                            #
#################################################################################


def test_weights_missing_on_one_node_are_named_before_sampling(demo, tmp_path):
    for node in ("n0", "n1"):
        (tmp_path / node).mkdir()
    (tmp_path / "n0" / "w.safetensors").symlink_to(demo[3])
    common, port = [*demo[:3], "w.safetensors", *demo[4:], "--output", tmp_path / "x.png"], free_port()
    nodes = [
        start(
            1,
            *common,
            cwd=tmp_path / f"n{i}",
            launch=["--nnodes=2", f"--node_rank={i}", "--master_addr=127.0.0.1", f"--master_port={port}"],
        )
        for i in range(2)
    ]
    text = finish(*nodes, status=USAGE)
    assert re.search(r"^sample_ddp.py: rank 1 on \S+: --ckpt w.safetensors: no such file", text, re.M)
    assert "step/s" not in text and not (tmp_path / "x.png").exists()


@pytest.mark.skipif(CUDA, reason="there is a GPU")
def test_ranks_without_gpus_are_named(demo):
    text = finish(start(2, *demo[:-1], "cuda"), status=USAGE)
    assert re.search(r"^sample_ddp.py: no GPU; .*--device cpu", text, re.M) and text.count("no GPU") == 1


@pytest.mark.parametrize(
    "args, words",
    [
        (["--labels", "1", "--num-fid-samples", "9"], "--labels: has no meaning with --num-fid-samples"),
        (["--decode", "gather", "--num-fid-samples", "9"], "--decode: has no meaning with --num-fid-samples"),
        (["--sample-dir", "here"], "--sample-dir: is for the folder of an FID job"),
        (["--per-proc-batch-size", "4"], "--per-proc-batch-size: is for the folder"),
        (["--tf32", "--precision", "fp32"], "--tf32: conflicts with --precision fp32"),
        (["--per-proc-batch-size", "0"], "--per-proc-batch-size 0: must be at least 1"),
        (["--world-independent-noise"], "--world-independent-noise: a grid is the same"),
        (["--num-fid-samples", "9", "--sample-dir", "/proc/nowhere"], "--sample-dir /proc/nowhere/"),
        (["--parallel", "rows=2"], "--parallel rows=2: needs 2 processes, there are 1"),
        (["--model", "DiT-Demo"], "--model DiT-Demo: unknown"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(args, words, demo):
    command = [sys.executable, str(ROOT / "sample_ddp.py"), *demo, *args]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == USAGE and words in done.stderr and "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if "sample_ddp.py" in line]) == 1
    assert not done.stdout  # nothing has been loaded


def test_a_mistake_in_the_flags_is_named_once(demo):
    """By rank 0; the others leave in silence, and later."""
    text = finish(start(3, *demo, "--per-proc-batch-size", "4"), status=USAGE)
    assert text.count("--per-proc-batch-size: is for the folder") == 1
