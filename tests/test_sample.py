"""sample.py as its users meet it: a command."""

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import ROOT, refused, succeeds
from jobs import Command
from PIL import Image
from safetensors.torch import load_file
from unprivileged import limited

from diffusion import create_diffusion
from models import DiT_models

DEMO = ("--model", "DiT-Demo/2", "--device", "cpu")


def test_grids_continue_one_stream(weights, tmp_path, run):
    """The contest's program seeds once, and samples one grid after another."""
    labels = torch.tensor([5, 2, 7])
    model = DiT_models["DiT-Demo/2"]()
    model.load_state_dict(load_file(weights))
    diffusion = create_diffusion("3")
    torch.manual_seed(6)
    wanted = []
    for _ in range(3):
        z = torch.randn(3, 4, 16, 16)
        model_kwargs = dict(y=torch.cat([labels, torch.full((3,), 8)]), cfg_scale=4.0)
        with torch.no_grad():
            samples = diffusion.p_sample_loop(
                model.eval().forward_with_cfg,
                (6, 4, 16, 16),
                torch.cat([z, z]),
                clip_denoised=False,
                model_kwargs=model_kwargs,
                device="cpu",
            )
        wanted.append(samples[:3].numpy())
    common = ["sample.py", *DEMO, "--ckpt", weights, "--num-sampling-steps", 3, "--seed", 6]
    common += ["--labels", 5, 2, 7, "--output-type", "latent", "--grids", 3, "--output"]
    for flags in ((), ("--gpus", 2), ("--batch-size", 2)):
        succeeds(run(*common, tmp_path / "l.npy", *flags))
        for index, samples in enumerate(wanted):
            found = np.load(tmp_path / f"l_{index}.npy")
            np.testing.assert_allclose(found, samples, rtol=0, atol=1e-4 * np.abs(samples).max())
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"l_{n}.npy" for n in range(3)]


def test_grids_and_seeds_conflict(tmp_path, here):
    line = refused(here("sample.py", *DEMO, "--grids", 2, "--seeds", 0, 1))
    assert line == "sample.py: --grids: conflicts with --seeds; give one\n"


@pytest.mark.parametrize("processes", (1, 2))
def test_a_picture_is_written_without_a_reader_of_its_lines(processes, demo, tmp_path):
    """`sample.py … | head -1`: head has ended before the last line."""
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
