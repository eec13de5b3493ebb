"""Requests and settings: what a model and its weights imply, and values that no command
is needed for. What commands refuse: tests/test_sample.py, tests/test_commands.py,
tests/test_doors.py.
"""

import os

import pytest
import torch
from conftest import fill
from networks import settings_of

from accel.door.opening import open_weights, reopen
from accel.errors import UsageError
from accel.families import DEMO
from accel.families.dit.network import DiT_models
from accel.flags import check_writable
from accel.request import FidRequest, GridRequest
from accel.settings import implied


def test_what_a_model_implies_unless_a_flag_says_otherwise():
    xl = implied(GridRequest())
    demo = implied(GridRequest(model="DiT-Demo/2"))
    assert (xl.image_size, xl.num_classes, xl.vae, xl.ckpt) == (512, 1000, "ema", None)
    assert xl.labels == (207, 360, 387, 974, 88, 979, 417, 279) and GridRequest().outputs == (
        "sample.png",
    )
    assert GridRequest(output=b"a.png").outputs == ("a.png",)
    # its factor may be 4
    assert implied(GridRequest("DiT-S/2", vae="some/folder", image_size=24)).image_size == 24
    assert (xl.model, xl.sampler, xl.cfg_scale, xl.num_sampling_steps, xl.seed) == (
        "DiT-XL/2",
        "ddpm",
        4.0,
        250,
        0,
    )
    assert (demo.image_size, demo.num_classes, demo.labels) == (128, 8, tuple(range(8)))
    assert (demo.vae, demo.ckpt) == (str(DEMO / "vae"), str(DEMO / "dit.safetensors"))
    latent = GridRequest(
        model="DiT-Demo/2", image_size=256, labels=(3,), vae="mse", output_type="latent"
    )
    other = implied(latent)
    assert (other.image_size, other.labels, other.vae, latent.outputs) == (
        256,
        (3,),
        "mse",
        ("sample.npy",),
    )
    for model in "SiT-XL/2", "Large-DiT-3B/2":
        assert implied(GridRequest(model=model)).image_size == 256
    assert implied(GridRequest(num_classes=12)).labels == tuple(range(8))
    assert xl.class_names[207] == "golden retriever" and demo.class_names[0] == "planet"
    for model in "DiT-S/8", "DiT-Demo/2":  # the demo's eight names are of eight classes
        assert implied(GridRequest(model=model, num_classes=10)).class_names == ()


def test_weights_come_before_their_model_and_a_request_before_both(tmp_path):
    state = fill(DiT_models["DiT-S/4"](input_size=8, num_classes=10)).state_dict()
    # the last one of training alone
    args = dict(guidance_channels=4, num_classes=10, vae="mse", schedule="cosine")
    torch.save({"ema": state, "metadata": None, "args": args}, tmp_path / "x.pt")
    request = GridRequest(ckpt=str(tmp_path / "x.pt"), output_type="latent", device="cpu")
    known = implied(request)  # names of labels, too, wait for the weights
    assert (known.model, known.image_size, known.labels, known.sampler) == (None, None, None, None)
    settings = open_weights(request, torch.device("cpu"))
    assert (settings.model, settings.image_size, settings.num_classes) == ("DiT-S/4", 64, 10)
    assert (settings.guidance_channels, settings.vae, settings.cfg_scale) == (4, "mse", 4.0)
    again = reopen(settings, guidance_channels=3, image_size=128, seed=7)
    assert (again.guidance_channels, again.image_size, again.latent_size, again.seed) == (
        3,
        128,
        16,
        7,
    )
    assert again.labels == settings.labels == tuple(range(8)) and again.weights is settings.weights


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


def test_a_grid_is_always_guided_and_an_fid_job_above_a_scale_of_one():
    """As upstream's two scripts do."""
    assert settings_of(GridRequest(cfg_scale=1.0)).guided
    for scale in (1.0, 4.0):
        assert settings_of(FidRequest(cfg_scale=scale, num_fid_samples=100)).guided == (scale > 1)
