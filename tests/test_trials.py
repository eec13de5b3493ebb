"""A sample of trials: flags in pairs, ends at any point of writing, and runs that must agree
or differ. Each is a run of a small network in this process.
"""

import argparse
import os
import sys
import threading

import numpy as np
import pytest
import torch
from conftest import fill
from forks import succeeds
from safetensors.torch import save_file

from accel.io.filesystem import atomic_write, remove_partial_files
from accel.jobs.fid import npz
from accel.jobs.fid.folder import write_pictures
from models import DiT_models


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A network of eight classes for 64 px in one block, in several files, and names."""
    folder = tmp_path_factory.mktemp("trials")
    state = fill(DiT_models["DiT-S/2"](input_size=8, num_classes=8, depth=1)).state_dict()
    arguments = argparse.Namespace(num_classes=8, num_heads=6)
    other = {name: value + 1 for name, value in state.items()}
    torch.save({"model": other, "ema": state, "opt": {}, "args": arguments}, folder / "a.pt")
    wrapped = {f"module.{name}": value for name, value in state.items()}
    torch.save({"ema": wrapped, "args": arguments}, folder / "wrapped.pt")
    transposed = {
        name: value.T.contiguous().T if value.ndim == 2 else value for name, value in state.items()
    }
    torch.save({"ema": transposed, "args": arguments}, folder / "strides.pt")
    save_file(state, folder / "a.safetensors", {"dit.num_heads": "6", "dit.num_classes": "8"})
    (folder / "link.pt").symlink_to("a.pt")
    (folder / "names.txt").write_text("\n".join(["one", "two", *"cdefgh"]))
    return folder


@pytest.fixture
def latents(files, here, tmp_path):
    """Run sample.py, or sample_ddp.py as one rank → latents."""

    def latents(flags=(), script="sample.py", ckpt="a.pt"):
        output = tmp_path / f"{len(list(tmp_path.iterdir()))}.npy"
        usual = ["--ckpt", files / ckpt, "--device", "cpu", "--num-sampling-steps", 3]
        usual += ["--output-type", "latent", "--output", output]
        usual += ["--labels", 1, 5] * ("--labels" not in flags)
        succeeds(here(script, *usual, *flags))
        written = sorted(tmp_path.glob(f"{output.stem}*"))
        found = np.stack([np.load(path) for path in written])
        assert np.isfinite(found).all() and found.std() > 0.1
        return found[0] if len(found) == 1 else found

    return latents


# ---- pairs of flags ----

# What is refused with any other flag, and what with one.
# ---- ends at any point ----


# The modules whose lines are end points: atomic files, the folder and the archive of an FID job.
TRACED = [sys.modules[one.__module__].__file__ for one in (atomic_write, write_pictures, npz.write)]


def run_traced(work, last=None):
    """Do `work`; end this process before the last-th line of the files TRACED. Return the file
    of each line that was run.
    """
    lines = []

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line":
            if len(lines) == last:
                os._exit(9)
            lines.append(frame.f_code.co_filename)
        return trace

    threading.settrace(trace)  # of pools
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return lines


def end(work, last):
    """Do `work` in a fork that ends at that line."""
    child = os.fork()
    if not child:
        try:
            run_traced(work, last)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_a_job_that_ends_at_any_point_is_made_whole(tmp_path):
    """Pictures, archive and record: each is whole or absent, and the next start makes what an
    undisturbed one makes.
    """
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)

    def work(root):
        folder = root / "pictures"
        (folder / ".job").mkdir(parents=True, exist_ok=True)
        remove_partial_files(folder, r"\d+\.png")
        remove_partial_files(root, r"pictures\.npz")
        remove_partial_files(folder / ".job", ".*")
        for number in range(2):
            if not (folder / f"{number:06d}.png").exists():
                write_pictures(folder, range(number, number + 1), pixels[number : number + 1])
        npz.write(folder, 2, 8, lambda: False)

    def pictures(root):
        return {path.name: path.read_bytes() for path in root.rglob("*.png")}

    lines = run_traced(lambda: work(tmp_path / "whole"))
    want = pictures(tmp_path / "whole")
    assert len(want) == 2 and set(lines) == set(TRACED)
    for last in range(len(lines)):
        ended = tmp_path / str(last)
        end(lambda: work(ended), last)
        archive = ended / "pictures.npz"
        assert not archive.exists() or np.array_equal(np.load(archive)["arr_0"], pixels), last
        assert pictures(ended).items() <= want.items(), last
        work(ended)
        assert pictures(ended) == want
        assert np.array_equal(np.load(archive)["arr_0"], pixels)
        assert npz.problem(ended / "pictures") is None
        names = sorted(path.name for path in ended.rglob("*") if path.is_file())
        assert names == sorted([*want, "npz.json", "pictures.npz"]), last


# ---- runs that agree ----

SAME = {
    "the same again": ({}, {}),
    "the average beside the weights": ({}, dict(ckpt="a.safetensors")),
    "a prefix of names": ({}, dict(ckpt="wrapped.pt")),
    "strides of tensors": ({}, dict(ckpt="strides.pt")),
    "a link": ({}, dict(ckpt="link.pt")),
    "one rank": ({}, dict(script="sample_ddp.py")),
    "the default of a seed": ({}, dict(flags=["--seed", 0])),
    "the default of guidance": ({}, dict(flags=["--cfg-scale", 4])),
    "the whole interval": ({}, dict(flags=["--guidance-interval", 0, 1])),
    "the usual channels": ({}, dict(flags=["--guidance-channels", 3])),
    "the size of the table": ({}, dict(flags=["--image-size", 64])),
    "the classes of the table": ({}, dict(flags=["--num-classes", 8])),
    "the default sampler": ({}, dict(flags=["--sampler", "ddpm"])),
    "one slice": ({}, dict(flags=["--batch-size", 2])),
    "no noise": (dict(flags=["--sampler", "ddim"]), dict(flags=["--sampler", "ddim", "--eta", 0])),
    "a shift of a seed of 32 bits": (
        dict(flags=["--seed", 7]),
        dict(flags=["--seed", 2**32 + 7]),
    ),
    "ranks' seed": (
        dict(flags=["--seed", 7]),
        dict(flags=["--global-seed", 7], script="sample_ddp.py"),
    ),
}
DIFFERENT = {
    "seed": ["--seed", 1],
    "scale": ["--cfg-scale", 2],
    "interval": ["--guidance-interval", 0, 0.5],
    "channels": ["--guidance-channels", 4],
    "sampler": ["--sampler", "ddim"],
    "solver": ["--sampler", "dpm++"],
    "labels": ["--labels", 2, 5],
}


@pytest.mark.parametrize("name", SAME)
def test_two_commands_of_one_meaning(name, latents):
    first, second = (latents(**how) for how in SAME[name])
    assert np.array_equal(first, second)


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_flag_that_means_something_changes_the_picture(name, latents):
    assert np.abs(latents() - latents(DIFFERENT[name])).max() > 1e-3


def test_a_scale_of_one_is_guidance_that_changes_nothing(latents):
    """It evaluates one row a latent, and has the same noise as other scales."""
    plain = latents(["--cfg-scale", 1])
    nearly = latents(["--cfg-scale", 1.000001])
    np.testing.assert_allclose(nearly, plain, atol=1e-4 * np.abs(plain).max())
    assert np.array_equal(latents(["--cfg-scale", 1, "--guidance-channels", 4]), plain)


def test_a_picture_depends_on_its_own_label_alone(latents):
    """Of pictures that share a batch, and in the order of the labels."""
    one = latents(["--labels", 1, 5])
    other = latents(["--labels", 1, 6])
    np.testing.assert_allclose(one[0], other[0], atol=1e-5)
    assert np.abs(one[1] - other[1]).max() > 1e-3
    seeds = latents(["--labels", 1, 5, "--seeds", 0, 9])
    assert np.array_equal(seeds[0], one) and np.abs(seeds[1] - one).max() > 1e-3
