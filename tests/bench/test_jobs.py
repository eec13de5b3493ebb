"""Whole processes: grids, the organisers' program and FID jobs; refusals before anything is
measured.
"""

import hashlib
import json
import os
import shutil
import subprocess
import time
from types import SimpleNamespace

import forks
import jobs
import pytest
import torch
from conftest import ROOT
from networks import build
from PIL import Image

from bench import measure, traces
from models import DiT_models

DEMO = "--model", "DiT-Demo/2", "--device", "cpu"
SMALL = "--model", "DiT-S/8", "--image-size", 64, "--num-sampling-steps", 1, "--device", "cpu"


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """The jobs' processes are forks: a fresh interpreter imports torch anew."""

    def run(command, cwd, **_):
        return forks.run(command[1:], cwd)

    monkeypatch.setattr(
        measure,
        "subprocess",
        SimpleNamespace(run=run, PIPE=subprocess.PIPE, Popen=subprocess.Popen),
    )


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


REFUSED = [
    (["ladder", *DEMO, "--output", "/proc/x.json"], "--output /proc/x.json: No such file"),
    (["ladder", *DEMO, "--only", "graph"], "--only: no rung has that in its name; there are fp32"),
    (["ladder", "--model", "DiT-S/8", "--image-size", "144"], "--image-size 144: must be a "),
    (["ladder", *DEMO, "--precision", "fp16"], "--precision fp16: cpu has no "),
    (["layouts", *DEMO], "use torchrun for layouts"),
    (["jobs", *DEMO, "--labels", "9"], "--labels 9: "),
    (["steps", *DEMO], "argument measurement: invalid choice: 'steps'"),
]


@pytest.mark.parametrize("arguments, words", REFUSED)
def test_refused_before_anything_is_measured(arguments, words, here):
    line = forks.refused(here("bench/measure.py", *arguments))
    assert line.startswith("measure.py: ") and words in line


def test_a_grid_of_two_ranks(tmp_path, log):
    """The picture that was timed is the one that the same settings make."""
    flags = "--labels", 5, 2, 0, "--num-sampling-steps", 2, "--seed", 3, "--grids", 2
    record, printed = log("jobs", *DEMO, *flags, "--gpus", 2, "--repeats", 1)
    [row] = record["contest"]
    assert json.loads(printed.splitlines()[-1]) == row
    names = "kind", "model", "image_size", "steps", "gpus", "pictures", "weights", "decoder"
    assert [record[name] for name in names] == [
        *("contest", "DiT-Demo/2", 128, 2, 2, 3, "dit.safetensors", "vae")
    ]
    [phases] = row["runs"]
    assert row["tier"] == "fp32" and row["seconds"] == phases["total"]
    assert {"load", "sample", "gather", "save", "total"} < set(phases)
    assert "3 labels × 2 grids · 2 steps" in row["settings"]
    words = "python sample.py --gpus 2 --model DiT-Demo/2 --device cpu --labels 5 2 0 "
    assert row["command"].startswith(words) and str(ROOT) not in row["command"]
    output = tmp_path / "again.png"
    jobs.run(2, *DEMO, *flags, "--output", output)
    assert record["grids"] == len(row["grids"]) == 2
    for index, grid in enumerate(row["grids"]):
        assert grid["file"] == f"log-fp32_{index}.png"
        assert digest(tmp_path / grid["file"]) == grid["picture"]
        again, timed = (Image.open(tmp_path / f) for f in (f"again_{index}.png", grid["file"]))
        assert again.tobytes() == timed.tobytes()
    weights = ROOT / "pretrained_models/demo/dit.safetensors"
    assert record["sha256"]["weights"] == digest(weights)


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
model.eval()
vae = AutoencoderKL.from_pretrained("pretrained_models/sd-vae-ft-ema")
time.sleep(0.5)
seconds = []
for grid in range(2):
    started = time.time()
    with torch.no_grad():
        for step in range(7):
            model.forward_with_cfg(torch.randn(4, 4, 16, 16), torch.zeros(4), torch.arange(4), 4.0)
            torch.add(1, step)
        pictures = vae.decode(torch.randn(2, 4, 8, 8)).sample
    time.sleep(0.2)
    seconds.append(time.time() - started)
    save_image(pictures, f"output/sample_{grid}.png")
print(f"Average sampling time: {sum(seconds) / 2:.4f} seconds.")
"""


def test_the_organisers_program(tmp_path, tiny_vae, log):
    """A program that prints what theirs does: T of its first grid has its loading, the figure
    that it prints has not.
    """
    fork = tmp_path / "fork"
    weights = tmp_path / "weights.pt"
    torch.save(build("DiT-Demo/2").state_dict(), weights)
    shutil.copytree(tiny_vae, fork / "pretrained_models/sd-vae-ft-ema")
    shutil.copy(ROOT / "models.py", fork)
    (fork / "sample.py").write_text(FORK)
    (fork / "sample_0.png").write_bytes(b"an older grid")
    os.utime(fork / "sample_0.png", (time.time() - 1e4,) * 2)
    record, _ = log("jobs", *DEMO, "--ckpt", weights, "--vae", tiny_vae, "--fork", fork)
    row = record["fork"]
    assert record["kind"] == "fork" and row["tier"] == "fp32"
    # The program sleeps: 0.2 s for each grid, and 0.5 s before the first.
    assert row["printed"] >= 0.2 and row["seconds"] >= 0.7
    for index, grid in enumerate(row["grids"]):
        picture = fork / f"output/sample_{index}.png"
        assert digest(picture) == grid["picture"] == digest(tmp_path / f"log_{index}.png")
    assert index == 1
    # three steps from one call of the network to the next, in a process that ends then
    trace = traces.read(tmp_path / row["trace"])
    names = [event.name for event in trace.work]
    assert names.count("aten::_scaled_dot_product_flash_attention_for_cpu") == 3 * len(
        DiT_models["DiT-Demo/2"]().blocks
    )


def test_random_weights_and_a_random_decoder_without_files(log):
    record, _ = log("jobs", *SMALL, "--labels", 0, "--repeats", 1)
    assert record["weights"] == record["decoder"] == "random, seed 0"
    [row] = record["contest"]
    assert row["seconds"] > 0 and "--ckpt FOLDER/random.pt --vae FOLDER" in row["command"]


def test_an_fid_job(log):
    """Two batches of two."""
    flags = "--num-fid-samples", 4, "--per-proc-batch-size", 2, "--num-sampling-steps", 2
    record, _ = log("jobs", *DEMO, *flags, "--repeats", 2)
    assert (record["kind"], record["pictures"], record["steps"]) == ("fid", 4, 2)
    [row] = record["fid"]
    assert row["tier"] == "fp32" and row["pictures_per_s"] > 0
    assert row["seconds"] == sum(each["total"] for each in row["runs"]) / 2
    assert all({"load", "sample", "decode"} < set(each) for each in row["runs"])
