"""Weights of unusual patches and channels, guidance below one, the null label."""

from functools import partial

import numpy as np
import pytest
import torch
from conftest import fill, mistake
from forks import refused, succeeds
from networks import error, small

from accel import Sampler, accelerate
from accel.decoders.loading import find
from accel.families.dit.network import DiT

HOW = dict(device="cpu", num_sampling_steps=3, output_type="latent")
FLAGS = ["--device", "cpu", "--num-sampling-steps", 3, "--output-type", "latent"]


def sampled(here, path, *flags):
    """Return the latents of a command."""
    output = path.with_suffix(".npy")
    succeeds(here("sample.py", "--ckpt", path, *FLAGS, *flags, "--output", output))
    return np.load(output)


@pytest.mark.parametrize("change", [dict(in_channels=1), dict(in_channels=2), dict(patch_size=1)])
@pytest.mark.parametrize("learn_sigma", [True, False])
def test_one_channel_two_channels_and_patch_one(change, learn_sigma, tmp_path, here):
    """Guidance is on all channels that there are, up to three."""
    model = small(**{**dict(num_classes=8), **change}, learn_sigma=learn_sigma)
    torch.save(model.state_dict(), tmp_path / "x.pt")
    got = sampled(here, tmp_path / "x.pt", "--num-heads", 2, "--labels", 3, 1)
    channels = change.get("in_channels", 3)
    with Sampler(model, **HOW, guidance_channels=channels, check=False) as sampler:
        want = sampler.latents((3, 1))
    assert got.shape == (2, change.get("in_channels", 4), 8, 8)
    assert error(torch.from_numpy(got), want.double()) < 1e-5
    assert got.std() > 0.1


@pytest.mark.parametrize("channels", [1, 2])
def test_a_module_of_few_channels_is_guided_as_its_own_method_does(channels):
    """Upstream's guides the first three of its output, among them the learned sigma."""
    model = small(in_channels=channels)
    x = torch.randn(4, channels, 8, 8)
    t = torch.tensor([7, 500] * 2)
    y = torch.tensor([1, 2, 8, 8])
    want = model.forward_with_cfg(x, t, y, 3.0).detach().double()
    assert error(accelerate(model).forward_with_cfg(x, t, y, 3.0), want) < 1e-5
    with Sampler(model, **HOW) as sampler:
        assert sampler.run.settings.guidance_channels == min(3, 2 * channels)
        assert sampler.latents((3, 1)).shape == (2, channels, 8, 8)
    for call in (accelerate, partial(Sampler, **HOW)):
        with mistake("guidance_channels"):
            call(model, guidance_channels=4)


def test_the_null_label_and_guidance_below_one(weights, tmp_path, here):
    # DDIM's steps do not read the learned sigma, which stays the label's.
    flags = ["--model", "DiT-Demo/2", "--guidance-channels", 4, "--sampler", "ddim"]
    (tmp_path / "x.safetensors").symlink_to(weights)

    def latents(*more):
        return sampled(here, tmp_path / "x.safetensors", *flags, *more)

    null = latents("--labels", "null", "--cfg-scale", 1)
    rounding = 1e-5 * np.abs(null).max()
    zero = latents("--labels", 3, "--cfg-scale", 0)
    half, one, two = (latents("--labels", 3, "--cfg-scale", scale) for scale in (0.5, 1, 2))
    assert np.abs(latents("--labels", "null", "--cfg-scale", 4) - null).max() < rounding
    assert np.abs(zero - null).max() < rounding < np.abs(one - null).max() / 100
    distance = [np.abs(each - null).mean() for each in (zero, half, one, two)]
    assert distance == sorted(distance)
    with Sampler("DiT-Demo/2", ckpt=weights, sampler="ddim", **HOW) as sampler:
        assert np.abs(sampler.latents("null", cfg_scale=1.0).numpy() - null).max() < rounding
    for scale in (-0.5, "nan"):
        done = here("sample.py", "--cfg-scale", scale, "--output", tmp_path / "y.png")
        assert "must be from 0 to 1000000" in refused(done)


def test_a_folder_of_null_labels_and_weights_without_one(tmp_path, tiny_vae, here):
    model = fill(DiT(input_size=4, hidden_size=48, depth=1, num_heads=2, num_classes=10))
    torch.save(model.state_dict(), tmp_path / "x.pt")
    command = ["sample.py", "--ckpt", tmp_path / "x.pt", "--num-heads", 2, "--vae", tiny_vae]
    command += ["--device", "cpu", "--num-sampling-steps", 1, "--labels", "null", 3, "--output"]
    succeeds(here(*command, f"{tmp_path}/out/"))
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert names == ["000-10.png", "001-3.png"]
    without = fill(DiT(hidden_size=48, depth=1, num_heads=2, num_classes=10, class_dropout_prob=0))
    with mistake("labels", "null"):
        Sampler(without, labels=["null"], cfg_scale=1, **HOW)


@pytest.mark.parametrize("prefix", ["", "first_stage_model."])
def test_sds_original_decoder(prefix, tmp_path, capsys):
    """A file in LDM's layout of four channels and factor 8, which specifies no scale."""
    from test_lightning_files import vae_files

    vae_files(tmp_path, levels=4, channels=4)
    (tmp_path / "latents_stats.pt").unlink()
    state = torch.load(tmp_path / "vavae.pt")["state_dict"]
    content = {f"{prefix}{name}": value for name, value in state.items()}
    torch.save({"state_dict": content}, tmp_path / "sd.ckpt")
    space = find(str(tmp_path / "sd.ckpt"))
    assert (space.scale, space.channels, space.factor) == (0.18215, 4, 8)
    assert "assuming Stable Diffusion's 0.18215" in capsys.readouterr().out
