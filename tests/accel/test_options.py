"""Options: what a model implies, and what is refused before torch is imported. Commands show it as one line:
tests/test_sample.py, tests/distributed/test_sample_ddp.py."""

import os
from dataclasses import fields

import pytest

from accel.errors import UsageError
from accel.families import DEMO
from accel.flags import check_writable, flag_names
from accel.options import FidOptions, GridOptions
from accel.precision import TIERS


def test_what_a_model_implies_unless_a_flag_says_otherwise():
    xl, demo = GridOptions().resolve(), GridOptions(model="DiT-Demo/2").resolve()
    assert (xl.image_size, xl.latent_size, xl.num_classes, xl.vae, xl.ckpt) == (512, 64, 1000, "ema", None)
    assert xl.labels == (207, 360, 387, 974, 88, 979, 417, 279) and xl.output == "sample.png"
    assert (xl.model, xl.cfg_scale, xl.num_sampling_steps, xl.seed) == ("DiT-XL/2", 4.0, 250, 0)
    assert (demo.image_size, demo.latent_size, demo.num_classes, demo.labels) == (128, 16, 8, tuple(range(8)))
    assert (demo.vae, demo.ckpt) == (str(DEMO / "vae"), str(DEMO / "dit.safetensors"))
    other = GridOptions(model="DiT-Demo/2", image_size=256, labels=(3,), vae="mse", output_type="latent").resolve()
    assert (other.image_size, other.labels, other.vae, other.output) == (256, (3,), "mse", "sample.npy")
    assert GridOptions(model="DiT-B/4").resolve().num_classes == 1000  # as every other model


def test_names_of_labels_wait_for_the_weights_that_say_whose_they_are():
    assert GridOptions(ckpt="x.pt", num_classes=8, labels=("planet",)).resolve().labels == ("planet",)


def test_the_flags_know_what_there_is():
    """accel/options.py is read before torch, so it has the tiers' names of its own."""
    [precision] = (item for item in fields(GridOptions) if item.name == "precision")
    assert set(precision.metadata["choices"]) == set(TIERS)
    [seed] = (item for item in fields(GridOptions) if item.name == "seed")
    assert flag_names(seed) == ("--seed",) and flag_names(seed, ranks=True) == ("--global-seed", "--seed")
    for item in (*fields(GridOptions), *fields(FidOptions)):
        assert item.name in ("space", "fit") or item.metadata["help"] and item.metadata["group"], item.name


def test_guidance_and_the_batch_of_a_kind_of_job():
    """A grid is always guided; an FID job as upstream only above a scale of one."""
    grid, job = GridOptions(cfg_scale=1.0).resolve(), dict(num_fid_samples=100, per_proc_batch_size=7)
    assert grid.guided and grid.pictures == "8 labels" and grid.smaller_batch.startswith("`labels`: 8 pictures")
    one = GridOptions(labels=(1,)).resolve()
    assert one.pictures == "1 label" and one.smaller_batch.startswith("`image_size=512`: a picture does not fit")
    for scale in (1.0, 4.0):
        options = FidOptions(cfg_scale=scale, **job).resolve()
        assert options.guided == (scale > 1) and options.pictures == "100 pictures"
        assert options.smaller_batch.startswith("`per_proc_batch_size=7`: ")


def test_what_is_written_where(tmp_path):
    check_writable(tmp_path / "deep" / "er" / f"{'x' * 251}.png")  # the longest name that there is
    assert list((tmp_path / "deep" / "er").iterdir()) == []
    for path, words in (
        (tmp_path / f"{'x' * 252}.png", "File name too long; choose another path"),
        ("/proc/nowhere/x.png", "choose another path"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(UsageError) as error:
            check_writable(path)
        assert str(error.value).startswith(f"output={path}: ") and words in str(error.value)


def test_what_is_not_a_file_is_not_written_over(tmp_path):
    """Root that writes to /dev/null would put a file in its place."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="json=.*pipe: is a folder, a device or a pipe; name a file"):
        check_writable(tmp_path / "pipe", "json")
