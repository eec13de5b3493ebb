"""The demo model's golden latents and picture, committed beside its weights: what `make sample` makes must stay what it is.

They were made on a CPU in float32; another machine's GEMMs round otherwise, and 250 steps carry that on. The bounds are those of
the strict gate (accuracy that no display shows), far below what any change of the mathematics would do.
"""

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image

DEMO = ROOT / "pretrained_models" / "demo"


def golden(kind):
    return np.load(DEMO / f"golden-{kind}.npy"), np.asarray(Image.open(DEMO / f"golden-{kind}.png")).astype(int)


def check(kind, run, tmp_path, *flags):
    """All 250 steps through the command, latents and picture."""
    latents, picture = golden(kind)
    done = run(
        "sample.py",
        "--model",
        "DiT-Demo/2",
        "--device",
        kind,
        *flags,
        "--output-type",
        "latent",
        "--output",
        tmp_path / "z.npy",
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    made = np.load(tmp_path / "z.npy")
    assert made.shape == latents.shape == (8, 4, 16, 16) and latents.std() > 0.3
    assert np.linalg.norm(made - latents) / np.linalg.norm(latents) < 1e-3
    return made, picture


@pytest.mark.timeout(1000)
def test_golden_on_the_cpu(run, tmp_path):
    from accel import vae

    made, picture = check("cpu", run, tmp_path)
    decoder = vae.load_vae(vae.find_vae(str(DEMO / "vae")), torch.device("cpu"))
    grid = vae.to_grid(vae.decode(decoder, torch.from_numpy(made))).numpy().astype(int)
    assert grid.shape == picture.shape == (262, 522, 3)
    assert np.abs(grid - picture).mean() <= 0.01 and picture.std() > 20


@pytest.mark.gpu
def test_golden_on_a_gpu(run, tmp_path):
    """CUDA's stream is another than the CPU's, and the same on every GPU for so small a draw."""
    check("cuda", run, tmp_path, "--precision", "fp32")
