"""A decoder's own space at every door: its scale, its channels, its factor."""

import numpy as np
import pytest
import torch
from conftest import fill, mistake
from forks import refused, succeeds
from networks import pipeline
from PIL import Image
from vaes import SCALES, by_pipelines, levels, random_vae

from accel import Sampler
from accel.decoders.loading import find
from accel.io.output import to_grid
from models import DiT_models

SHORT = dict(device="cpu", num_sampling_steps=2)
FLAGS = ["--device", "cpu", "--num-sampling-steps", 2]


def picture(vae, latents):
    return to_grid(by_pipelines(vae, latents)).numpy()


@pytest.mark.parametrize("change", ("a shift", "statistics"))
def test_every_door_decodes_as_diffusers(change, tiny_vae, tmp_path, here):
    pipe = pipeline(random_vae(tiny_vae, SCALES[change]))
    pipe.save_pretrained(tmp_path / "pipe")
    for model in (pipe, str(tmp_path / "pipe")):
        with Sampler(model, **SHORT) as sampler:
            latents = sampler.latents(207, seed=1)
            [got] = sampler.sample(207, seed=1)
            want = picture(pipe.vae, latents)
            assert np.array_equal(np.asarray(got), want) and want.std() > 5
    named = [
        "--ckpt",
        tmp_path / "pipe" / "transformer",
        "--vae",
        tmp_path / "pipe" / "vae",
        "--labels",
        207,
    ]
    succeeds(here("sample.py", *FLAGS, *named, "--seed", 1, "--output", tmp_path / "x.png"))
    assert np.array_equal(np.asarray(Image.open(tmp_path / "x.png")), want)


def test_what_the_caller_set_in_a_config_counts(tiny_vae):
    """Pipelines read attributes; `register_to_config` sets entries too."""
    pipe = pipeline(random_vae(tiny_vae, {}))
    own = random_vae(tiny_vae, {})
    pipe.vae.config.scaling_factor = 0.13025
    own.register_to_config(shift_factor=0.5)
    for how, vae in (({}, pipe.vae), (dict(vae=own), own), (dict(vae=torch.compile(own)), own)):
        with Sampler(pipe, **SHORT, **how) as sampler:
            assert np.array_equal(
                np.asarray(sampler.sample(3)[0]), picture(vae, sampler.latents(3))
            )
    pipe.vae.config.scaling_factor = torch.tensor(0.2)
    with mistake("vae", "config.json", "scaling_factor"):
        Sampler(pipe, **SHORT)


def test_statistics_given_for_a_folder_are_in_place_of_its_scale(tiny_vae, tmp_path):
    torch.save(
        dict(mean=torch.ones(1, 4, 1, 1), std=torch.full((1, 4, 1, 1), 2.0)), tmp_path / "stats.pt"
    )
    z = torch.randn(2, 4, 8, 8)
    assert torch.equal(find(str(tiny_vae), str(tmp_path / "stats.pt")).to_decoder(z), z * 2 + 1)


def test_decoders_of_another_class_are_refused_by_name(tiny_vae):
    from diffusers import AutoencoderKL, AutoencoderTiny, VQModel

    class Own(AutoencoderKL):
        def decode(self, z, **how):
            return super().decode(2 * z, **how)

    for other in (Own.from_pretrained(tiny_vae), AutoencoderTiny(), VQModel()):
        with mistake("vae", type(other).__name__, "AutoencoderKL"):
            Sampler(pipeline(None), vae=other, **SHORT)


def test_channels_and_factor_are_the_decoders(tiny_vae, tmp_path, here):
    """Python, ranks and an FID job: tests/test_toy_family.py,
    tests/test_lightning_files.py.
    """
    random_vae(tiny_vae, levels(8, 8, 12, 16, 16, latent_channels=16)).save_pretrained(
        tmp_path / "vae"
    )
    model = fill(DiT_models["DiT-S/4"](input_size=4, in_channels=16, num_classes=10))
    torch.save(model.state_dict(), tmp_path / "own.pt")
    command = [
        "sample.py",
        *FLAGS,
        "--ckpt",
        tmp_path / "own.pt",
        "--num-classes",
        10,
        "--output",
        tmp_path / "x.png",
    ]
    assert "weights trained at" not in succeeds(
        here(*command, "--vae", tmp_path / "vae", "--labels", 7)
    )
    assert Image.open(tmp_path / "x.png").size == (64, 64)
    words = f"--vae {tiny_vae}: decodes latents of 4 channels, and DiT-S/4 makes 16; give"
    assert words in refused(here(*command, "--vae", tiny_vae))
