"""Whole processes: the contest's time and points, and FID jobs."""

import hashlib
import os
import shutil
import time
from subprocess import CompletedProcess
from types import SimpleNamespace

import forks
import pytest
from conftest import ROOT
from forks import refused

from bench import harness, jobs


@pytest.fixture
def forked(monkeypatch):
    """The jobs' processes are forks, torchrun's ranks too: its agent would import torch
    anew in each.
    """

    def run(command, cwd, **_):
        words = command[1:]
        if words[:3] != forks.torchrun(1)[:3]:
            return forks.run(words, cwd)
        ranks = forks.ranks(int(words[3].removeprefix("--nproc_per_node=")), words[4:], cwd)
        texts = [rank.communicate(timeout=240) for rank in ranks]
        return CompletedProcess(command, max(rank.returncode for rank in ranks), *texts[0])

    monkeypatch.setattr(jobs, "subprocess", SimpleNamespace(run=run))


@pytest.mark.parametrize(
    "seconds, points", [(0.5, 50), (100, 50), (300 / 3**0.5, 25), (299.9, 0.015), (900, 0)]
)
def test_the_contests_points(seconds, points):
    assert jobs.score(seconds) == pytest.approx(points, abs=0.001)


def test_contest(forked, tmp_path, run, log):
    record, printed = log("jobs", "--contest", "--device", "cpu", "--num-sampling-steps", 2)
    [row] = record["contest"]
    [once] = row["runs"]
    assert record["kind"] == "contest" and record["model"] == "DiT-Demo/2" and record["steps"] == 2
    assert record["gpus"] == 1
    assert row["tier"] == "fp32" and row["seconds"] == once["total"] < once["process"]
    assert "points" not in row and "a rehearsal, no points" in printed
    assert {"load", "sample", "decode", "save"} < set(once)
    # The picture that was timed is the one that the same settings make.
    flags = ["--model", "DiT-Demo/2", "--device", "cpu", "--num-sampling-steps", "2", "--output"]
    assert run("sample.py", *flags, tmp_path / "again.png").returncode == 0
    assert hashlib.sha256((tmp_path / "again.png").read_bytes()).hexdigest() == row["picture"]
    assert "DiT-Demo/2 · 128 px · 8 labels · 2 steps" in row["settings"]


def test_contest_of_two_ranks(forked, tmp_path, log):
    """The first labels only; the picture is kept beside the record."""
    small = "--gpus", 2, "--device", "cpu", "--steps", 1, "--pictures", 3
    record, _ = log("jobs", "--contest", "all", *small)
    [row] = record["contest"]
    assert record["gpus"] == 2 and record["pictures"] == 3 and row["settings"].endswith(" 2 ranks")
    assert "3 labels" in row["settings"] and str(ROOT) not in row["command"]
    assert row["command"].startswith("python sample.py --gpus 2 --model ")
    assert "--labels 0 1 2 " in row["command"]
    kept = tmp_path / row["file"]
    assert kept.name == "log-fp32.png"
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == row["picture"]
    assert {"load", "sample", "gather", "save", "total"} < set(row["runs"][0])


FORK = """import argparse
import time
import torch
from diffusers.models import AutoencoderKL
from torchvision.utils import save_image
from models import DiT_models

parser = argparse.ArgumentParser()
for name in ("model", "image-size", "num-sampling-steps", "ckpt"):
    parser.add_argument(f"--{name}")
args = parser.parse_args()
model = DiT_models[args.model](input_size=int(args.image_size) // 8)
model.load_state_dict(torch.load(args.ckpt))
vae = AutoencoderKL.from_pretrained("pretrained_models/sd-vae-ft-ema")
time.sleep(0.5)
seconds = []
for grid in range(2):
    started = time.time()
    with torch.no_grad():
        pictures = vae.decode(torch.randn(2, 4, 8, 8)).sample
    time.sleep(0.2)
    seconds.append(time.time() - started)
    save_image(pictures, f"output/sample_{grid}.png")
print(f"Average sampling time: {sum(seconds) / 2:.4f} seconds.")
"""


def test_the_organisers_program(forked, tmp_path, tiny_vae, log):
    """A program that prints what theirs does: T of its first grid has its loading, the figure
    that it prints has not.
    """
    fork = tmp_path / "fork"
    shutil.copytree(tiny_vae, fork / "pretrained_models/sd-vae-ft-ema")
    shutil.copy(ROOT / "models.py", fork)
    (fork / "sample.py").write_text(FORK)
    (fork / "sample_0.png").write_bytes(b"an older grid")
    os.utime(fork / "sample_0.png", (time.time() - 1e4,) * 2)
    small = "--model", "DiT-S/8", "--image-size", 64, "--steps", 1, "--device", "cpu"
    record, printed = log("jobs", "--fork", fork, *small)
    row = record["fork"]
    assert record["kind"] == "fork" and row["tier"] == "fp32" and row["grids"] == 2
    # The program sleeps: 0.2 s for each grid, and 0.5 s before the first.
    assert row["printed"] >= 0.2 and row["seconds"] >= 0.7
    assert f"printed: {row['printed']} s" in printed
    first = (fork / "output/sample_0.png").read_bytes()
    assert (tmp_path / row["file"]).read_bytes() == first
    assert row["picture"] == hashlib.sha256(first).hexdigest()


def test_random_weights_and_a_random_decoder_without_files(forked, log):
    small = "--model", "DiT-S/8", "--image-size", 64, "--steps", 1
    record, printed = log("jobs", "--contest", "--device", "cpu", *small)
    assert record["weights"] == record["decoder"] == "random, seed 0"
    assert (
        record["contest"][0]["seconds"] > 0
        and "--ckpt FOLDER/random.pt --vae FOLDER/vae" in record["contest"][0]["command"]
        and "A picture of random ones is a rehearsal's" in printed
    )


@pytest.mark.parametrize("random", ["weights", "decoder"])
def test_the_contests_job_with_random_weights_is_a_rehearsal(random):
    """Random weights cost the same time, so the report gives points for T."""
    record = jobs.CONTEST | dict(weights="XL.pt", decoder="ema")
    assert not jobs.rehearsal(record) and jobs.rehearsal(record | dict(steps=25))
    record[random] = harness.RANDOM
    assert jobs.rehearsal(record) and not jobs.other_job(record)


def test_all_missing_files_are_named_at_once(run, tmp_path):
    """Weights and decoder without a network connection, as sample.py does."""
    names = "http_proxy", "https_proxy", "HTTPS_PROXY", "HF_ENDPOINT"
    nowhere = dict.fromkeys(names, "http://127.0.0.1:9") | dict(HF_HUB_CACHE=str(tmp_path))
    flags = "--model", "DiT-XL/2", "--ckpt", "DiT-XL-2-512x512.pt", "--vae", "ema"
    line = refused(run("bench/jobs.py", "--contest", "--device", "cpu", *flags, **nowhere))
    assert "--ckpt DiT-XL-2-512x512.pt: download failed" in line
    assert "--vae stabilityai/sd-vae-ft-ema: not here" in line


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_fid_job(ranks, forked, log):
    count = 4 * ranks
    small = "--batch", 2, "--device", "cpu", "--steps", 2
    record, printed = log("jobs", "--fid", count, "--gpus", ranks, *small)
    assert (record["kind"], record["pictures"], record["steps"]) == ("fid", count, 2)
    assert (record["gpus"], record["precision"]) == (ranks, "fp32")
    [once] = record["fid"]
    assert once["pictures_per_s"]["whole"] == count / once["process"]
    assert once["pictures_per_s"]["steady"] > 0
    assert 0 < once["sample"] + once["decode"] < once["total"] < once["process"]
    assert "steady" in printed


def test_pictures_per_second(tmp_path):
    """Three batches of two: the first, which warms up, does not count."""
    (tmp_path / "job").mkdir()
    for index, second in enumerate((100, 108, 110, 111, 112, 112)):
        (tmp_path / "job" / f"{index:06}.png").touch()
        os.utime(tmp_path / "job" / f"{index:06}.png", (second, second))
    assert jobs.pictures_per_second(tmp_path, 2) == 4 / (112 - 108)


def test_a_commands_complaint_is_given_in_its_line(forked, tmp_path, here):
    done = here(
        "bench/jobs.py",
        "--contest",
        "--device",
        "cpu",
        "--model",
        "DiT-S/8",
        "--vae",
        "x",
        "--output",
        tmp_path / "x.json",
    )
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(
        "jobs.py: sample.py: --vae x: "
    )
