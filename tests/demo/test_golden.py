"""The demo models' golden latents and picture, committed beside their weights: what they
make must stay what it is.

They were made in float32 on a CPU and on a GPU. Another machine's GEMMs round otherwise,
and 250 steps carry that on. The bounds are those of the strict criterion (accuracy that
no display shows), far below what any change of the mathematics would do.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ROOT
from forks import succeeds
from networks import ready
from PIL import Image

from accel.distributed import Placement
from accel.io.output import to_grid

DEMO = ROOT / "pretrained_models" / "demo"


def near(made, golden):
    assert made.shape == golden.shape and golden.std() > 0.3
    assert np.linalg.norm(made - golden) / np.linalg.norm(golden) < 1e-3


@pytest.mark.parametrize(
    "model, file, options",
    [
        ("DiT-Demo/2", "golden-cpu.npy", {}),
        (
            "Large-DiT-Demo/2",
            "large-dit-golden-cpu.npy",
            dict(sampler="ddim", num_sampling_steps=25),
        ),
        ("SiT-Demo/2", "sit-golden-cpu.npy", dict(sampler="heun", num_sampling_steps=12)),
    ],
)
def test_golden_on_the_cpu(model, file, options):
    """Sample one of the eight pictures through all steps."""
    run, pipeline = ready(model=model, device="cpu", **options)
    third = replace(pipeline, placement=Placement(world=8, rank=2))
    near(third.latents(run.settings.labels, 0).numpy(), np.load(DEMO / file)[2:3])


def test_the_golden_picture():
    _, pipeline = ready(model="DiT-Demo/2", device="cpu")
    golden = torch.from_numpy(np.load(DEMO / "golden-cpu.npy"))
    grid = to_grid(pipeline.decode(golden)).numpy().astype(int)
    picture = np.asarray(Image.open(DEMO / "golden-cpu.png")).astype(int)
    assert grid.shape == picture.shape == (262, 522, 3)
    assert np.abs(grid - picture).mean() <= 0.01 and picture.std() > 20


@pytest.mark.gpu
def test_golden_on_a_gpu(here, tmp_path):
    """CUDA's random stream differs from the CPU's. So small a draw is the same on every GPU."""
    flags = "--model", "DiT-Demo/2", "--device", "cuda", "--precision", "fp32"
    output = "--output-type", "latent", "--output", tmp_path / "z.npy"
    succeeds(here("sample.py", *flags, *output))
    near(np.load(tmp_path / "z.npy"), np.load(DEMO / "golden-cuda.npy"))


def test_the_card_quotes_the_committed_figures():
    training, figures = (
        json.loads((DEMO / name).read_text()) for name in ("training.json", "score.json")
    )
    quoted = [
        f"{100 * figures['recognised']:.1f} %",
        f"{training['vae']['psnr_db']} dB",
        str(training["dit"]["loss"]),
    ]
    quoted += [f"{name} {100 * share:.1f} %" for name, share in figures["by_class"].items()]
    card = (DEMO / "README.md").read_text()
    assert [figure for figure in quoted if figure not in card] == []
    assert max(path.stat().st_size for path in DEMO.rglob("*.safetensors")) <= 25_000_000
