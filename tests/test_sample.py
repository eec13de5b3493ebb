"""sample.py as its users meet it: a command."""

import resource
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

DEMO = ("--model", "DiT-Demo/2", "--device", "cpu")


#################################################################################
#                                    Pictures                                   #
#################################################################################


def test_picture_and_latents_are_the_same_in_two_processes(weights, tiny_vae, tmp_path, run, here, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    common = ["sample.py", *DEMO, "--ckpt", weights, "--num-sampling-steps", 4, "--labels", 1, 5, 7, 0, 2]
    outputs = []
    for name, command in (("a", here), ("b", run)):
        folder = tmp_path / name
        done = command(*common, "--vae", tiny_vae, "--output", folder / "deep" / "p.png")
        assert done.returncode == 0, done.stderr
        latent = command(*common, "--output-type", "latent", "--output", folder / "l.npy")
        assert latent.returncode == 0, latent.stderr
        assert all(word in done.stdout for word in ("load", "sample", "decode", "save", "total", "5 labels", "fp32"))
        outputs.append(((folder / "deep" / "p.png").read_bytes(), np.load(folder / "l.npy")))
    (picture, latents), (again, latents_again) = outputs
    assert picture == again and np.array_equal(latents, latents_again)
    assert latents.dtype == np.float32 and latents.shape == (5, 4, 16, 16)
    image = Image.open(tmp_path / "a" / "deep" / "p.png")
    assert image.mode == "RGB" and image.size == (4 * 130 + 2, 2 * 130 + 2) and np.asarray(image).std() > 1


def test_repeats_time_the_same_picture(weights, tmp_path, here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = [*DEMO, "--ckpt", weights, "--num-sampling-steps", 3, "--labels", 4, "--output-type", "latent"]
    results = []
    for repeats in (1, 3):
        done = here("sample.py", *common, "--repeats", repeats)
        assert done.returncode == 0 and "· 1 label ·" in done.stdout, done.stderr
        results.append(np.load("sample.npy"))
    assert "3 runs after warm-up: median" in done.stdout and "warm-up" in done.stdout.splitlines()[-1]
    assert np.array_equal(*results)


def test_training_checkpoint_and_other_sizes(weights, tmp_path, here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {}, "ema": load_file(weights), "opt": {}}, "train.pt")
    common = [*DEMO, "--ckpt", "train.pt", "--num-sampling-steps", 2, "--output-type", "latent"]
    done = here("sample.py", *common, "--image-size", 192)
    assert done.returncode == 0 and "trained at 128 px" in done.stdout, done.stderr
    assert np.load("sample.npy").shape == (8, 4, 24, 24)


#################################################################################
#                                   Bad input                                   #
#################################################################################


@contextmanager
def little_memory():
    """Inside, this process gets 64 MB beyond what it has."""
    pages, limits = Path("/proc/self/statm").read_text().split()[0], resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (resource.getpagesize() * int(pages) + 2**26, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("where", ["loading", "sampling"])
def test_too_little_memory_is_one_line(where, weights, tmp_path, here):
    path = tmp_path / "large.pt"
    if where == "loading":  # 512 MB: what earlier tests have freed of this process is no help
        torch.save({"x": torch.zeros(2**27)}, path)
    flags = ["--ckpt", path] if where == "loading" else ["--ckpt", weights, "--image-size", 2048]
    with little_memory():
        done = here(
            "sample.py", *DEMO, *flags, "--labels", 1, "--output", tmp_path / "x.npy", "--output-type", "latent"
        )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].startswith("sample.py: memory ran out; use a smaller --image-size"), done.stderr
    path.unlink(missing_ok=True)
    assert not (tmp_path / "x.npy").exists()
