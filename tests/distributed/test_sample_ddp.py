"""sample_ddp.py in real processes that talk over gloo: equal to one process, killed, stopped, starved of disk, misled."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, fill
from PIL import Image
from safetensors.torch import load_file, save_file

from accel import fid
from accel.engine import Engine
from accel.options import STOPPED, DistributedOptions, UsageError
from accel.parallel.group import SILENCE, Group, Stopped
from accel.parallel.rows import share
from diffusion import create_diffusion
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


def files(folder):
    """Every file of an FID job with its bytes: pictures, .npz, records."""
    return {
        str(file.relative_to(folder)): file.read_bytes() for file in sorted(Path(folder).rglob("*")) if file.is_file()
    }


def pictures(folder):
    return {file.name: np.asarray(Image.open(file)) for file in sorted(Path(folder).glob("*/*.png"))}


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
#                                 Folders for FID                               #
#################################################################################


def by_hand(weights, vae_folder, rank, world, n, rounds, cfg_scale, seed, steps):
    """Upstream's job for one rank, as its users know it: seed, then per round z, labels, p_sample_loop, decode → {number: picture}."""
    from diffusers import AutoencoderKL

    model = DiT_models["DiT-Demo/2"]().eval()
    model.load_state_dict(load_file(weights))
    vae = AutoencoderKL.from_pretrained(vae_folder)
    diffusion, out = create_diffusion(str(steps)), {}
    torch.manual_seed(seed * world + rank)
    with torch.no_grad():
        for round_ in range(rounds):
            z = torch.randn(n, 4, 16, 16)
            y = torch.randint(0, 8, (n,))
            if cfg_scale > 1:
                z2, y2 = torch.cat([z, z]), torch.cat([y, torch.full((n,), 8)])
                latents = diffusion.p_sample_loop(
                    model.forward_with_cfg,
                    z2.shape,
                    z2,
                    clip_denoised=False,
                    model_kwargs=dict(y=y2, cfg_scale=cfg_scale),
                )[:n]
            else:
                latents = diffusion.p_sample_loop(
                    model.forward, z.shape, z, clip_denoised=False, model_kwargs=dict(y=y)
                )
            pixels = torch.cat([vae.decode(latent[None] / 0.18215).sample for latent in latents])
            for i, picture in enumerate(
                (127.5 * pixels + 128).clamp(0, 255).permute(0, 2, 3, 1).to(torch.uint8).numpy()
            ):
                out[f"{i * world + rank + round_ * n * world:06d}.png"] = picture
    return out


@pytest.mark.parametrize("world, cfg_scale", [(2, 1.5), (1, 1.0)])
def test_folder_is_upstreams(world, cfg_scale, demo, weights, tiny_vae, tmp_path):
    n, wanted, seed, steps = 3, 7, 5, 3
    rounds = -(-wanted // (n * world))
    text = finish(
        *ranks(
            world,
            *demo,
            "--num-fid-samples",
            wanted,
            "--per-proc-batch-size",
            n,
            "--global-seed",
            seed,
            "--cfg-scale",
            cfg_scale,
            "--num-sampling-steps",
            steps,
            "--sample-dir",
            tmp_path,
        )
    )
    assert f"· {wanted} pictures ·" in text and "labels" not in text  # it draws its own
    name = f"DiT-Demo-2-demo-size-128-vae-{tiny_vae.name}-cfg-{cfg_scale}-seed-5"
    assert {path.name for path in tmp_path.iterdir()} == {name, name + ".npz"}
    expected = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for rank in range(world):
        expected |= by_hand(weights, tiny_vae, rank, world, n, rounds, cfg_scale, seed, steps)
    torch.set_num_threads(threads)
    mine = pictures(tmp_path)
    assert sorted(mine) == sorted(expected) == [f"{i:06d}.png" for i in range(rounds * n * world)]
    # The null half's update is left out, which leaves the stream as it is, and changes nothing else on the CPU.
    assert all(np.array_equal(mine[name], expected[name]) for name in mine)
    assert len({picture.tobytes() for picture in mine.values()}) == len(mine)
    array = np.load(tmp_path / f"{name}.npz")["arr_0"]
    assert array.dtype == np.uint8 and np.array_equal(
        array, np.stack([expected[f"{i:06d}.png"] for i in range(wanted)])
    )


FID = ["--num-fid-samples", 42, "--per-proc-batch-size", 2, "--num-sampling-steps", 20]


@pytest.fixture(scope="module")
def undisturbed(demo, tmp_path_factory):
    """Files of a job of two ranks that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(*ranks(2, *demo, *FID, "--sample-dir", folder))
    made = files(folder)
    assert sum(name.endswith(".png") for name in made) == 44 and not any(".part" in name for name in made)
    return made


def test_ten_kills_change_nothing(demo, undisturbed, tmp_path):
    """One job, killed ten times: while it starts, or a random moment after some more pictures; one rank (the other must end by itself) or
    all at once. Begun again each time with the same command, it ends with every bit of an undisturbed one."""
    dice, seen = random.Random(time.time_ns()), []

    def count():
        return len(list(tmp_path.glob("*/*.png")))

    for kill in range(10):
        before, processes = count(), ranks(2, *demo, *FID, "--sample-dir", tmp_path, output=subprocess.DEVNULL)
        if starting := kill % 4 == 3:
            time.sleep(dice.uniform(0.2, 3))
        else:
            wait_for_pictures(tmp_path, before + dice.randint(1, 3))
            time.sleep(dice.uniform(0, 0.2))
        # A lone victim: rank 0 holds the store, so the other notices at once. The slow way, by silence, is tested below.
        # Before the ranks have met only a launcher can tell that one is gone, and here is none: then all at once.
        victims = processes if starting or dice.random() < 0.6 else processes[:1]
        for victim in victims:
            victim.kill()
        for process in processes:
            process.wait(60)
        seen.append(
            (len(victims), count(), sum(len(p.read_bytes().splitlines()) for p in tmp_path.glob("*/.job/rank*")))
        )
    assert sum(0 < made < 44 for _, made, _ in seen) >= 7, seen
    finish(*ranks(2, *demo, *FID, "--sample-dir", tmp_path))
    assert files(tmp_path) == undisturbed, seen


def test_a_signal_to_one_rank_stops_all_and_the_job_goes_on(demo, undisturbed, tmp_path):
    """SIGUSR1 to one rank, then, in the next run, SIGTERM to the other."""
    for number, victim in ((signal.SIGUSR1, 1), (signal.SIGTERM, 0)):
        least = 2 + len(list(tmp_path.glob("*/*.png")))  # two more than there are: the signal is for a job at work
        processes = ranks(2, *demo, *FID, "--sample-dir", tmp_path)
        wait_for_pictures(tmp_path, least)
        processes[victim].send_signal(number)
        assert "start again with the same command" in finish(*processes, status=STOPPED)
        made = files(tmp_path)
        count = sum(name.endswith(".png") for name in made)
        assert least <= count < 44 and not any(".part" in name or name.endswith("npz") for name in made)
        assert (
            sum(text.count(b"\n") for name, text in made.items() if name.endswith("jsonl")) * 2 == count
        )  # all that was made is recorded
    finish(*ranks(2, *demo, *FID, "--sample-dir", tmp_path))
    assert files(tmp_path) == undisturbed


def wait_for_pictures(folder, count, seconds=60):
    deadline = time.monotonic() + seconds
    while len(list(Path(folder).glob("*/*.png"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_disk_full_ends_cleanly_and_goes_on(demo, undisturbed, tmp_path):
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "test", tmp_path], capture_output=True).returncode
    ):
        pytest.skip("a file system of its own needs root and mount")
    try:
        text = finish(*ranks(2, *demo, *FID, "--sample-dir", tmp_path), status=2)
        assert "--sample-dir: No space left on device" in text and "free some" in text and "Traceback" not in text
        made = files(tmp_path)
        assert not any(".part" in name for name in made) and 0 < sum(name.endswith(".png") for name in made) < 44
        pages = sum(-(-len(content) // 4096) for name, content in undisturbed.items() if not name.endswith(".npz"))
        subprocess.run(
            ["mount", "-o", f"remount,size={4 * pages + 400}k", tmp_path], check=True
        )  # for the pictures, not for the .npz
        first, second = ranks(2, *demo, *FID, "--sample-dir", tmp_path)
        assert "--sample-dir: No space left on device" in finish(first, status=2)
        finish(second)
        assert sum(name.endswith(".png") for name in files(tmp_path)) == 44 and not list(tmp_path.glob("*npz*"))
        subprocess.run(["mount", "-o", "remount,size=100m", tmp_path], check=True)
        finish(*ranks(2, *demo, *FID, "--sample-dir", tmp_path))
        assert files(tmp_path) == undisturbed
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_world_independent_noise(demo, undisturbed, tmp_path):
    """Three ranks, one rank, and a job begun by two and ended by one: the same pictures."""
    how = [*demo, *FID, "--num-fid-samples", 22, "--num-sampling-steps", 8, "--world-independent-noise", "--sample-dir"]
    text = finish(*ranks(3, *how, tmp_path / "3"))
    shown = [int(number) for number in re.findall(r"(\d+)/22 \[\S+ +\S*(?:picture/s|s/picture)\]", text)]
    assert shown == sorted(shown) and shown[-1] == 22, text  # one bar, over all ranks
    finish(*ranks(1, *how, tmp_path / "1"))
    processes = ranks(2, *how, tmp_path / "2+1", output=subprocess.DEVNULL)
    wait_for_pictures(tmp_path / "2+1", 3)
    for process in processes:
        process.kill()
        process.wait()
    finish(*ranks(1, *how, tmp_path / "2+1"))
    three, one, mixed = (pictures(tmp_path / name) for name in ("3", "1", "2+1"))
    assert (
        sorted(three) == [f"{i:06d}.png" for i in range(22)]
        and len({picture.tobytes() for picture in three.values()}) == 22
    )
    for other in (one, mixed):
        assert sorted(other) == sorted(three) and all(np.array_equal(other[name], three[name]) for name in three)
    archives = [next((tmp_path / name).glob("*.npz")).read_bytes() for name in ("3", "1", "2+1")]
    assert archives[0] == archives[1] == archives[2]


def test_records_that_do_not_hold(demo, undisturbed, tmp_path):
    """A torn last line, a picture that is gone, a leftover of a killed writer: mended. Other settings, pictures of unknown origin: refused
    by name."""
    command = [*demo, *FID, "--sample-dir", tmp_path]
    for name, content in undisturbed.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    home = next(path for path in tmp_path.iterdir() if path.is_dir())
    tmp_path.joinpath(home.name + ".npz").unlink()
    record = home / ".job" / "rank-0001.jsonl"
    lines = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(b"".join(lines[:4]) + lines[4][:100])
    (home / "000000.png").unlink()
    (home / ".000017.png.part").write_bytes(b"half a picture")
    finish(*ranks(2, *command))
    mended = files(tmp_path)
    assert sum(name.endswith(".part") for name in mended) == 0
    assert {k: v for k, v in mended.items() if not k.endswith("0000.jsonl")} == {
        k: v for k, v in undisturbed.items() if not k.endswith("0000.jsonl")
    }

    for change, name in (
        (["--num-sampling-steps", 31], "--num-sampling-steps 31"),
        (["--per-proc-batch-size", 3], "--per-proc-batch-size 3"),
        (["--num-fid-samples", 43], "--num-fid-samples 43"),
    ):
        text = finish(*ranks(1 if name.startswith("--num-s") else 2, *command, *change), status=2)
        assert name in text and "--sample-dir" in text and text.count("sample_ddp.py") == 1
    text = finish(*ranks(1, *command), status=2)
    assert "number of ranks 1" in text and "begun with 2" in text
    for file in (home / ".job").iterdir():
        file.unlink()
    assert "without a record" in finish(*ranks(2, *command), status=2)
    assert files(home).keys() == {name.split("/", 1)[1] for name in mended if name.endswith(".png")}


def test_names_are_on_disk_before_what_relies_on_them(tmp_path, monkeypatch):
    """In the order of a power cut: the pictures' folder, then the line, then, for the first line, the record's own name. And what a job left that had finished
    no batch is no part of the next one's folder, whose settings may be others."""
    folder, order = tmp_path / "pictures", []
    plan = fid.Plan(DistributedOptions(num_fid_samples=8, per_proc_batch_size=4).resolve(), 0, 1)
    monkeypatch.setattr(
        fid.os,
        "fsync",
        lambda handle, fsync=os.fsync: (order.append(os.readlink(f"/proc/self/fd/{handle}")), fsync(handle)),
    )
    fid.Journal.prepare(folder, tmp_path / "pictures.npz", {"--seed": 1})
    assert order[1:] == [str(folder / ".job"), str(folder), str(tmp_path)]
    for number in range(9):
        fid.write_picture(folder / fid.picture_name(number), np.zeros((8, 8, 3), np.uint8))
    (folder / ".000009.png.part").touch()
    fid.Journal.prepare(folder, tmp_path / "pictures.npz", {"--seed": 2})
    journal = fid.Journal(folder, plan)
    assert [path.name for path in folder.iterdir()] == [".job"] and journal.read() == set()
    for batch in (0, 1):
        order.clear()
        journal.record(batch, b"state")
        assert order == [str(folder), str(journal.path), *([str(folder / ".job")] if batch == 0 else [])]
    with pytest.raises(UsageError, match="--seed 3: .* begun with 2"):
        fid.Journal.prepare(folder, tmp_path / "pictures.npz", {"--seed": 3})
    with pytest.raises(UsageError, match="--forecast plan of 4: .* begun with off;"):
        fid.Journal.prepare(folder, tmp_path / "pictures.npz", {"--seed": 2, "--forecast": "plan of 4"})
    (folder / ".job" / "settings.json").unlink()
    with pytest.raises(UsageError, match="without a record of how they were made"):
        fid.Journal.prepare(folder, tmp_path / "pictures.npz", {"--seed": 3})


def test_other_kernels_are_named_and_go_on(tmp_path, capsys):
    folder, npz = tmp_path / "pictures", tmp_path / "pictures.npz"
    fid.Journal.prepare(folder, npz, {"--seed": 1, fid.CODE: "a"})
    (folder / ".job" / "rank-0000.jsonl").write_text('{"batch": 0}\n')
    fid.Journal.prepare(folder, npz, {"--seed": 1, fid.CODE: "a"})
    assert capsys.readouterr().out == ""
    fid.Journal.prepare(folder, npz, {"--seed": 1, fid.CODE: "b"})
    assert "may differ" in capsys.readouterr().out
    with pytest.raises(UsageError, match="--seed 2: .* begun with 1"):
        fid.Journal.prepare(folder, npz, {"--seed": 2, fid.CODE: "b"})


def test_npz_is_streamed(tmp_path):
    """1200 pictures of 256 px are 236 MB; writing their archive takes a tenth. Read by numpy, and by the zip member as ADM's does."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    dice = np.random.default_rng(0)
    originals = dice.integers(0, 256, (8, 256, 256, 3), dtype=np.uint8)
    for i in range(1200):
        if i < 8:
            fid.write_picture(folder / fid.picture_name(i), originals[i])
        else:
            os.link(folder / fid.picture_name(i % 8), folder / fid.picture_name(i))
    code = (
        "import resource, pathlib, numpy, PIL.Image; from accel import fid; peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"folder = pathlib.Path({str(folder)!r}); fid.write_npz(folder, folder.parent / 'warm.npz', 40, 256); before = peak()\n"
        "fid.write_npz(folder, folder.parent / 'x.npz', 1200, 256); print((peak() - before) * 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 24e6
    array = np.load(tmp_path / "x.npz")["arr_0"]
    assert array.shape == (1200, 256, 256, 3) and all(
        np.array_equal(array[i], originals[i % 8]) for i in range(0, 1200, 7)
    )
    with zipfile.ZipFile(tmp_path / "x.npz") as archive, archive.open("arr_0.npy") as member:
        assert archive.testzip() is None and np.lib.format.read_magic(member) == (1, 0)
        assert np.lib.format.read_array_header_1_0(member) == ((1200, 256, 256, 3), False, np.dtype(np.uint8))
    (folder / fid.picture_name(3)).unlink()
    (folder / fid.picture_name(3)).write_bytes(b"\x89PNG\r\n\x1a\nnonsense")
    with pytest.raises(UsageError, match="000003.png: cannot be read .* delete it"):
        fid.write_npz(folder, tmp_path / "y.npz", 10, 256)
    with pytest.raises(Stopped, match="start again"):
        fid.write_npz(folder, tmp_path / "y.npz", 3, 256, stopping=lambda: True)
    assert not list(tmp_path.glob("*y.npz*")) and not list(tmp_path.glob(".*.part"))


def test_a_rank_s_seed_fits_into_64_bits(tmp_path):
    options = DistributedOptions(num_fid_samples=9, seed=10**19, sample_dir=str(tmp_path)).resolve()
    fid.check(options, 1)
    torch.manual_seed(options.seed)  # as many bits as that
    with pytest.raises(UsageError, match="--global-seed 10000000000000000000: times 2 ranks"):
        fid.check(options, 2)
    options.world_independent_noise = True
    fid.check(options, 2)


def test_a_batch_without_memory_is_named(tmp_path, monkeypatch):
    """Wherever it is first met: where products are chosen, or in the job itself."""
    options = DistributedOptions(
        model="DiT-Demo/2",
        num_fid_samples=8,
        per_proc_batch_size=4,
        num_sampling_steps=2,
        device="cpu",
        sample_dir=str(tmp_path),
    ).resolve()
    group, run = Group(0, 1, 0, dist.HashStore()), Engine(options)

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried")

    monkeypatch.setattr(run, "denoise", full)
    for work in (
        lambda: fid._choose_products(run, group, fid.Plan(options, 0, 1), tmp_path),
        lambda: fid.run(run, group),
    ):
        with pytest.raises(
            UsageError, match="^--per-proc-batch-size 4: does not fit in the GPU's memory; use a smaller one$"
        ):
            work()
    group.leave()


def test_plan_covers_every_picture_once():
    for wanted, n, world, independent in [
        (7, 3, 2, False),
        (50, 4, 3, False),
        (1, 8, 4, False),
        (7, 3, 2, True),
        (22, 2, 5, True),
        (3, 8, 4, True),
    ]:
        options = DistributedOptions(
            num_fid_samples=wanted, per_proc_batch_size=n, world_independent_noise=independent
        ).resolve()
        plans = [fid.Plan(options, rank, world) for rank in range(world)]
        made = sorted(number for plan in plans for batch in plan.left(set()) for number in plan.pictures(batch))
        assert made == list(range(plans[0].total))
        assert plans[0].total == (wanted if independent else -(-wanted // (n * world)) * n * world)


#################################################################################
#                              Failure and bad input                            #
#################################################################################


def test_a_rank_that_raises_ends_the_job_with_its_traceback(demo, tmp_path):
    """Rank 1 meets a folder where its picture belongs. Its traceback comes first, torchrun's summary names it, nobody hangs."""
    home = tmp_path / fid.folder_of(options_of(demo)).name
    (home / ".job").mkdir(parents=True)
    (home / ".job" / "settings.json").write_text("{}")
    (home / "000001.png").mkdir()
    start = time.monotonic()
    text = finish(torchrun(2, *demo, *FID, "--num-fid-samples", 4000, "--sample-dir", tmp_path), status=1)
    assert time.monotonic() - start < 60
    first = text.index("Traceback")
    assert re.search(r"rank 1 of 2 on \S+:\n$", text[:first]) and "IsADirectoryError" in text[first:].split("\n\n")[0]
    assert "rank 0: rank 1 on" in text and "ended the job: IsADirectoryError" in text
    assert re.search(r"Root Cause.*rank\s+: 1 .*IsADirectoryError", text, re.S)


def options_of(demo):
    named = dict(zip((flag[2:] for flag in demo[::2]), demo[1::2]))
    return DistributedOptions(num_fid_samples=1, **named).resolve()


def test_a_rank_that_vanishes_is_missed_without_a_launcher(demo, tmp_path):
    """No torchrun looks on: the silence alone ends the job, within a minute."""
    processes = ranks(2, *demo, *FID, "--num-fid-samples", 100000, "--sample-dir", tmp_path)
    wait_for_pictures(tmp_path, 2)
    processes[1].kill()
    start = time.monotonic()
    _, error = processes[0].communicate(timeout=60)
    assert (
        processes[0].returncode == 1
        and "rank 1 has given no sign of life" in error
        and SILENCE - 5 < time.monotonic() - start < 60
    )
    processes[1].communicate()


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
        (["--num-fid-samples", "9", "--sample-dir", "/proc/nowhere"], "--sample-dir /proc/nowhere/"),
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
