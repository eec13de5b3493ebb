"""What sample.py and sample_ddp.py offer people: names, folders, seeds, batches, plain
terminals.
"""

import json
import os
import re
import subprocess
import sys

import jobs
import numpy as np
import pytest
import torch
from conftest import ROOT, mistake
from forks import succeeds
from networks import latents_of, ready
from PIL import Image

from accel.config.options import Options
from accel.config.rules import Request
from accel.families import model_names

DEMO = ("--model", "DiT-Demo/2", "--device", "cpu", "--num-sampling-steps", 2)


def picture(path):
    return np.asarray(Image.open(path))


def test_a_folder_gets_one_png_a_picture(here, tmp_path):
    """The tiles of the grid, to the bit, under names that say what they are. An existing
    folder needs no slash.
    """
    labels = "--labels", "planet", 7, "Sea"
    succeeds(here("sample.py", *DEMO, *labels, "--output", tmp_path / "grid.png"))
    stdout = succeeds(here("sample.py", *DEMO, *labels, "--output", f"{tmp_path}/new/folder/"))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").touch()
    succeeds(here("sample_ddp.py", *DEMO, *labels, "--output", tmp_path / "old"))
    names = ["000-0-planet.png", "001-7-mushroom.png", "002-5-sea.png"]
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == names
    assert sorted(path.name for path in (tmp_path / "old").iterdir()) == [*names, "notes.txt"]
    assert f"{tmp_path}/new/folder/: load" in stdout
    grid = picture(tmp_path / "grid.png")
    for index, name in enumerate(names):
        tile = grid[2:130, 130 * index + 2 :][:, :128]
        assert np.array_equal(picture(tmp_path / "new" / "folder" / name), tile) and tile.std() > 1
        assert np.array_equal(picture(tmp_path / "old" / name), tile)


def test_a_list_of_seeds_is_as_many_runs(here, tmp_path):
    one = *DEMO, "--labels", 1
    succeeds(here("sample.py", *one, "--seed", 0, "--output", tmp_path / "alone-0.png"))
    succeeds(here("sample_ddp.py", *one, "--global-seed", 7, "--output", tmp_path / "alone-7.png"))
    stdout = succeeds(here("sample.py", *one, "--seeds", 0, 7, "--output", tmp_path / "all.png"))
    assert (
        "1 label × 2 seeds" in stdout
        and f"{tmp_path}/all-seed-0.png, {tmp_path}/all-seed-7.png: load" in stdout
    )
    succeeds(here("sample_ddp.py", *one, "--seeds", 0, 7, "--output", f"{tmp_path}/all/"))
    for number in (0, 7):
        alone = picture(tmp_path / f"alone-{number}.png")
        single = tmp_path / "all" / f"seed-{number}" / "000-1-mountains.png"
        assert np.array_equal(picture(tmp_path / f"all-seed-{number}.png"), alone)
        assert np.array_equal(picture(single), alone)
    assert not np.array_equal(picture(tmp_path / "alone-0.png"), alone)


def test_slices_are_the_pictures_of_one_batch():
    """A slice takes its part of the full draw, so the pictures are the same: up to
    float32 rounding, as GEMMs of other sizes add in another order. One batch of all is
    the same to the bit.
    """
    given = dict(model="DiT-Demo/2", device="cpu", num_sampling_steps=3, seed=3)
    whole = latents_of(*ready(**given))
    for batch_size, slices in (1, 8), (3, 3), (8, 1):
        run, pipeline = ready(**given, batch_size=batch_size)
        seen = []
        latents = latents_of(run, pipeline, lambda index, x: seen.append(index))
        assert seen == list(range(3 * slices))
        assert batch_size < 8 or torch.equal(latents, whole)
        assert (
            whole.abs().max() > 0.5 and (latents - whole).abs().max() <= 1e-3 * whole.abs().max()
        ), batch_size


def test_a_log_off_a_terminal(run, here, demo, tmp_path):
    """Whole lines at tqdm's interval, with --quiet nothing but --json's line."""
    job = *demo, "--num-fid-samples", 6, "--per-proc-batch-size", 2, "--num-sampling-steps", 2
    job += "--sample-dir", tmp_path
    done = run("sample_ddp.py", *job, "--json", TQDM_MININTERVAL="0")
    line = r"[246] of 6 pictures, [\d.,]+/s, \d+ (s|min) left\n"
    assert re.fullmatch(f"({line}){{3}}", done.stderr) and "\r" not in done.stdout
    result = json.loads(succeeds(done).splitlines()[-1])
    folder = next(tmp_path.glob("*.npz")).with_suffix("")
    assert result["files"] == [str(folder), f"{folder}.npz"]
    assert {"load", "sample", "decode", "npz", "total"} == {*result["seconds"]}
    assert result["settings"]["num_fid_samples"] == {"value": 6, "origin": "options"}
    assert result["settings"]["cfg_scale"] == {"value": 1.5, "origin": "job"}
    assert "labels" not in result["settings"]
    done = here("sample_ddp.py", *job, "--quiet")
    assert succeeds(done) == done.stderr == ""


def test_one_rank_prints_the_line_of_json(demo, tmp_path):
    words = "--labels", 1, 5, "--num-sampling-steps", 2, "--seeds", 0, 7, "--output", tmp_path
    result = json.loads(jobs.run(2, *demo, *words, "--quiet", "--json"))
    files = [str(path) for path in sorted(tmp_path.rglob("*.png"))]
    assert len(files) == 4 and result["files"] == files
    assert result["settings"]["seed_list"] == {"value": [0, 7], "origin": "options"}
    assert result["settings"]["labels"]["value"] == [1, 5]
    assert {"load", "sample", "gather", "save", "total", "since_start"} <= {*result["seconds"]}


BOTH = (
    (["--labels", "plnet"], "--labels plnet: no class has that name; give one of planet (0)"),
    (["--labels", -1], "--labels -1: the model has classes 0 to 7"),
    (["--image-size", 250], "--image-size 250: must be a multiple of 16"),
    (
        ["--model", "DiT-Dmo/2"],
        "--model DiT-Dmo/2: unknown; did you mean DiT-Demo/2? All are DiT-XL/2",
    ),
    (["--model", "xxx"], "--model xxx: unknown; choose from DiT-XL/2"),
    (
        ["--model", "DiT-B/4", "--output-type", "latent"],
        "--ckpt: no published weights for DiT-B/4 at 512 px",
    ),
    (["--ckpt", "no/such.pt"], "--ckpt no/such.pt: no such file"),
    (["--ckpt", ""], "--ckpt: is empty; give a value, or leave it out"),
    (["--seeds", 2**64], "must be from -9223372036854775808 to"),
    (["--seeds", 1, 2, 1], "--seeds: contains a seed twice"),
    (["--seeds=--"], "--seeds: give at least one"),
    (
        ["--guidance-interval", 0.5, 0.5],
        "--guidance-interval 0.5 0.5: must be two, the lower first",
    ),
    (["--guidance-channels", 5], "--guidance-channels 5: these latents have 4"),
    (["--batch-size", 0], "--batch-size 0: must be from 1 to"),
    (["--num-sampling-steps", 1001], "--num-sampling-steps 1001: must be from 1 to 1000"),
    (
        ["--sampler", "dpm++", "--num-sampling-steps", 1000],
        "1000: must be from 1 to 999 for --sampler dpm++",
    ),
    (["--cfg-scale", "nan"], "--cfg-scale nan: must be from 0"),
    (["--cfg-scale", "9e18"], "--cfg-scale 9e+18: must be from 0 to 1000000"),
    (["--output", "x.jpg"], "must end in .png for --output-type image, or name a folder (FOLDER/)"),
    (["--output", "folder/", "--output-type", "latent"], "--output folder/: must end in .npy"),
    (["--output", "file/deeper/"], "--output file/deeper/000.png: Not a directory"),
    (["--output", "pipe.png"], "--output pipe.png: is a folder, a device or a pipe; name a file"),
    (["--output", 300 * "a" + ".png"], "aaa.png: File name too long; choose another path"),
    (["--precision", "tf32"], "--precision tf32: cpu has no TF32"),
    (["--precision", "fp8"], "argument --precision: invalid choice: 'fp8' (choose from 'fp32'"),
    (["--num-classes", 9], "dit.safetensors has 8 classes, and its label table one more row"),
    (["--lables", 3], "unrecognized arguments: --lables 3; did you mean --labels?"),
    (["--num_classes=8"], "unrecognized arguments: --num_classes=8; did you mean --num-classes?"),
    (["--no-such-word", 3], "unrecognized arguments: --no-such-word 3\n"),
    (["SDE"], "unrecognized arguments: SDE\n"),
    (["--sampler", "dopri5"], "argument --sampler: invalid choice: 'dopri5' (choose from 'ddpm'"),
    (["--output", f"{125 * 'é'}/{124 * 'é'}.npy"], ".npy: must end in .png"),
    (["--output", f"{126 * 'é'}.png"], "é.png: File name too long; choose another path"),
)
MISTAKES = {
    "sample.py": [
        (["--seed", 2**64], f"--seed {2**64}: must be from -9223372036854775808 to"),
        (["--seeds", 1, "--seed", 2], "--seeds: conflicts with"),
        (["--num-fid-samples", 9], "unrecognized arguments: --num-fid-samples 9"),
        (["--latent-stats", "none"], "--latent-stats none: No such file"),
        (["--vae", "no/vae"], "no/vae by other means and give its folder, or its .pt file"),
        (["--device", "gpu7"], "--device gpu7: no such kind of device; try cuda, cuda:1 or cpu"),
        (["--device", "xpu"], "cannot sample there; use cuda or cpu"),
        *[(["--device", "cuda"], "finds no CUDA GPU; use --device cpu")]
        * (not torch.cuda.is_available()),
    ],
    "sample_ddp.py": [
        (["--device", "mps"], "--device mps: ranks sample on cuda or cpu; choose one"),
        (["--device", "cuda:x"], "--device cuda:x: ranks sample on cuda or cpu; choose one"),
        (
            ["--labels", 1, "--num-fid-samples", 9],
            "--labels: has no meaning with --num-fid-samples",
        ),
        (["--sample-dir", "here"], "--sample-dir: is for an FID job"),
        (["--parallel", "tokens=3"], "--parallel tokens=3: does not divide the 64 tokens of a row"),
        (["--world-independent-noise"], "--world-independent-noise: is for an FID job"),
        (["--num-fid-samples", 9, "--sample-dir", "/proc/nowhere"], "--sample-dir /proc/nowhere/"),
    ],
}


@pytest.mark.parametrize(
    "script, flags, words",
    [(script, *case) for script, own in MISTAKES.items() for case in (*BOTH, *own)],
)
def test_mistakes_are_one_line(script, flags, words, here, tmp_path, monkeypatch):
    """Before anything is loaded, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe.png")
    usual = [word for pair in zip(DEMO[::2], DEMO[1::2]) if pair[0] not in flags for word in pair]
    done = here(script, *usual, *flags)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr) < 1100, done.stderr
    assert (
        done.stderr.startswith(f"{script}: ") and done.stderr.count("\n") == 1 and not done.stdout
    )
    assert {path.name for path in tmp_path.iterdir()} == {"file", "pipe.png"}


@pytest.mark.parametrize("name", [f"{125 * 'é'}.png", f"{62 * '🦊'}.npy", 251 * "x" + ".png"])
def test_a_name_as_long_as_a_name_may_be(name, here, tmp_path):
    """254, 252 and 255 bytes: the temporary file's name is not longer."""
    kind = "latent" if name.endswith("npy") else "image"
    words = "--labels", 1, "--output-type", kind, "--output", tmp_path / name
    succeeds(here("sample.py", *DEMO, *words))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_tf32_is_a_permission(here, tmp_path):
    """Hardware without TF32 samples in float32, as upstream does, and prints one line."""
    outputs = {}
    for flag in ("--tf32", "--no-tf32"):
        command = *DEMO, "--labels", 1, flag, "--output", tmp_path / f"{flag}.png"
        outputs[flag] = succeeds(here("sample_ddp.py", *command))
    assert (
        outputs["--tf32"].count("--tf32: cpu has no TF32 (Ampere or later); sampling in fp32") == 1
    )
    assert "--tf32:" not in outputs["--no-tf32"] and all(
        "· fp32 ·" in text for text in outputs.values()
    )
    pictures = [picture(tmp_path / f"{flag}.png") for flag in outputs]
    assert np.array_equal(*pictures)
    with mistake("tf32", "fp32"):
        Request.open(Options(tf32=True, precision="fp32"))


@pytest.mark.parametrize("script", ["sample.py", "sample_ddp.py"])
def test_help_has_groups_whole_names_and_three_examples(script, run):
    text = succeeds(run(script, "--help", COLUMNS="150"))
    places = [
        text.index(f"\n{group}:\n")
        for group in ("what to sample", "speed", "files", "advanced", "examples")
    ]
    assert places == sorted(places)
    examples = text.partition("\nexamples:\n")[2].strip().splitlines()
    assert len(examples) == 3 and all(f" {script} " in f"{line} " for line in examples)
    narrow = succeeds(run(script, "--help", COLUMNS="80"))
    assert all(f" {name}" in narrow for name in model_names())  # whole, to be copied


def test_a_terminal_that_lacks_characters(tmp_path):
    command = [
        sys.executable,
        "sample.py",
        *map(str, DEMO),
        "--labels",
        "sea",
        "--output",
        tmp_path / "p.png",
    ]
    ascii = os.environ | dict(PYTHONIOENCODING="ascii")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=ascii)
    assert "DiT-Demo/2 ? 128 px ? 1 label" in succeeds(done)
