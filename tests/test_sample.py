"""sample.py as its users meet it: a command."""

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import ROOT, succeeds
from jobs import Command
from PIL import Image
from unprivileged import limited

DEMO = ("--model", "DiT-Demo/2", "--device", "cpu")


def test_picture_and_latents_are_the_same_in_two_processes(
    weights, tiny_vae, tmp_path, run, here, monkeypatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    common = [
        "sample.py",
        *DEMO,
        "--ckpt",
        weights,
        "--num-sampling-steps",
        4,
        "--labels",
        1,
        5,
        7,
        0,
        2,
    ]
    outputs = []
    for name, command in (("a", here), ("b", run)):
        folder = tmp_path / name
        text = succeeds(command(*common, "--vae", tiny_vae, "--output", folder / "deep" / "p.png"))
        succeeds(command(*common, "--output-type", "latent", "--output", folder / "l.npy"))
        assert all(
            word in text
            for word in ("load", "sample", "decode", "save", "total", "5 labels", "fp32")
        )
        outputs.append(((folder / "deep" / "p.png").read_bytes(), np.load(folder / "l.npy")))
    (picture, latents), (again, latents_again) = outputs
    assert picture == again and np.array_equal(latents, latents_again)
    assert latents.dtype == np.float32 and latents.shape == (5, 4, 16, 16)
    image = Image.open(tmp_path / "a" / "deep" / "p.png")
    assert (
        image.mode == "RGB"
        and image.size == (4 * 130 + 2, 2 * 130 + 2)
        and np.asarray(image).std() > 1
    )


@pytest.mark.parametrize("processes", (1, 2))
def test_a_picture_is_written_without_a_reader_of_its_lines(processes, demo, tmp_path):
    """As by `sample.py … | head -1`, in which head has ended before the last line."""
    words = "--labels", 1, "--num-sampling-steps", 2, "--output", tmp_path / "x.png"
    job = Command(ROOT / "sample.py", *demo, *words, "--gpus", processes)
    job.process.stdout.close()
    job.process.stdout = None
    status, error = job.end()
    assert status == 0 and "Error" not in error, error
    assert Image.open(tmp_path / "x.png").size == (128, 128)


def test_memory_that_runs_out_in_loading_is_named(tmp_path, here):
    path = tmp_path / "large.pt"
    # 512 MB: what earlier tests have freed of this process is no help
    torch.save({"x": torch.zeros(2**27)}, path)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    # 64 MB beyond what this process has
    with limited("AS", resource.getpagesize() * pages + 2**26):
        output = "--output", tmp_path / "x.npy", "--output-type", "latent"
        done = here("sample.py", *DEMO, "--ckpt", path, "--labels", 1, *output)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "llocate memory" in done.stderr.splitlines()[-1], done.stderr
    path.unlink()
    assert not (tmp_path / "x.npy").exists()
