"""Requests and settings: what a model and its weights imply, and values that no command
is needed for. What commands refuse: tests/test_sample.py, tests/test_commands.py,
tests/test_doors.py.
"""

import os

import pytest
import torch
from conftest import fill
from networks import filled

from accel.config import Grid
from accel.errors import UsageError
from accel.families import DEMO
from accel.families.dit.network import DiT_models
from accel.flags import check_writable
from accel.grid import ready
from accel.opening import open_model
from accel.pipeline import opened_guidance

pytestmark = pytest.mark.usefixtures("switches")  # of the process: opening sets them


def test_what_a_model_implies_unless_a_flag_says_otherwise():
    xl = filled(Grid())
    config = xl.config
    assert (config.image_size, config.num_classes, config.vae, config.ckpt) == (
        512,
        1000,
        "ema",
        None,
    )
    assert (config.model, config.sampler, config.cfg_scale) == ("DiT-XL/2", "ddpm", 4.0)
    assert (config.num_sampling_steps, config.seed) == (250, 0)
    assert xl.labels == (207, 360, 387, 974, 88, 979, 417, 279)
    assert Grid().outputs == ("sample.png",) and Grid(output=b"a.png").outputs == ("a.png",)
    Grid.of("DiT-S/2", vae="some/folder", image_size=24).check()  # its factor may be 4

    demo = filled(Grid.of("DiT-Demo/2"))
    assert (demo.config.image_size, demo.config.num_classes) == (128, 8)
    assert demo.labels == tuple(range(8)) and demo.config.vae == str(DEMO / "vae")
    assert demo.config.defaults.ckpt == str(DEMO / "dit.safetensors")
    latent = Grid.of("DiT-Demo/2", image_size=256, labels=(3,), vae="mse", output_type="latent")
    other = filled(latent)
    assert (other.config.image_size, other.labels, other.config.vae) == (256, (3,), "mse")
    assert latent.outputs == ("sample.npy",)
    for model in "SiT-XL/2", "Large-DiT-3B/2":
        assert filled(Grid.of(model)).config.image_size == 256
    assert filled(Grid.of(num_classes=12)).labels == tuple(range(8))
    assert xl.class_names[207] == "golden retriever" and demo.class_names[0] == "planet"
    for model in "DiT-S/8", "DiT-Demo/2":  # the demo's eight names are of eight classes
        assert filled(Grid.of(model, num_classes=10)).class_names == ()


def test_weights_come_before_their_model_and_options_before_both(tmp_path):
    state = fill(DiT_models["DiT-S/4"](input_size=8, num_classes=10)).state_dict()
    # the last one of training alone
    args = dict(guidance_channels=4, num_classes=10, vae="mse", schedule="cosine")
    torch.save({"ema": state, "metadata": None, "args": args}, tmp_path / "x.pt")
    grid = Grid.of(ckpt=str(tmp_path / "x.pt"), output_type="latent", device="cpu")
    grid.check()  # names of labels, too, wait for the weights
    assert grid.config.named_model is None and grid.config.vae is None
    opened = open_model(grid.config, decodes=False)
    config = opened.config
    assert (config.model, config.image_size, config.num_classes) == ("DiT-S/4", 64, 10)
    assert (config.guidance_channels, config.vae, config.cfg_scale) == (4, "mse", 4.0)
    again = opened.changed(guidance_channels=3, image_size=128, seed=7)
    assert (again.config.guidance_channels, again.config.image_size) == (3, 128)
    assert (again.latent_size, again.config.seed) == (16, 7)
    assert grid.filled(config, opened.fit).labels == tuple(range(8))
    assert again.weights is opened.weights
    for wrong, words in (
        (dict(seed=2**64), "seed=18446744073709551616: must be from -9223372036854775808 to"),
        (dict(guidance_interval=(1, 0)), "guidance_interval=1 0: must be two numbers"),
        (dict(precision="fp32", vae_precision="fp16"), "vae_precision=fp16: cpu has no float16"),
    ):
        with pytest.raises(UsageError, match=words):
            opened.changed(**wrong)


def test_what_is_written_where(tmp_path):
    check_writable(tmp_path / "deep" / "er" / f"{'x' * 251}.png")  # the longest name that there is
    assert list((tmp_path / "deep" / "er").iterdir()) == []
    os.mkfifo(tmp_path / "pipe")  # root that writes to /dev/null would put a file in its place
    os.symlink("/proc/nowhere/x.png", tmp_path / "link")
    for path, words in (
        (tmp_path / f"{'x' * 252}.png", "File name too long; choose another path"),
        ("/proc/nowhere/x.png", "choose another path"),
        (tmp_path / "link", "No such file or directory; choose another path"),
        (tmp_path / "pipe", "is a folder, a device or a pipe; name a file"),
    ):
        with pytest.raises(UsageError) as error:
            check_writable(path)
        assert str(error.value).startswith(f"output={path}: ") and words in str(error.value)


def test_an_error_is_worded_for_its_door():
    error = UsageError("`image_size=17`: must be 16; `tf32=False` or `tf32`, `num_classes=8`")
    assert str(error) == "image_size=17: must be 16; tf32=False or tf32, num_classes=8"
    assert error.by_flags() == "--image-size 17: must be 16; --no-tf32 or --tf32, --num-classes 8"


@pytest.mark.parametrize("scale", (0.0, 0.5, 1.0, 4.0))
def test_guidance_is_the_same_through_every_door(scale, weights):
    """It is computed unless the scale is 1. Grids draw upstream's 2n rows of noise at every
    scale, FID jobs n rows without guidance.
    """
    grid = ready(Grid.of("DiT-Demo/2", ckpt=str(weights), device="cpu", cfg_scale=scale))
    of_job = opened_guidance(grid.opened, upstreams_job=True)
    for guidance, drawn in ((grid.pipeline.guidance, 2), (of_job, 1 if scale == 1 else 2)):
        assert (guidance.scale, guidance.copies) == (scale, 1 if scale == 1 else 2)
        assert guidance.drawn == drawn
