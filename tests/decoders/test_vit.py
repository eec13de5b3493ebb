"""ViT decoders: their mathematics, files, statistics, levels and float16."""

import json
import shutil

import forks
import numpy as np
import pytest
import torch
from conftest import fill, mistake
from forks import succeeds
from networks import upstreams_loop
from PIL import Image
from vits import SMALL, random_state, random_statistics, vit_files, written_out

from accel import Sampler
from accel.decoders.decoder import Decoder
from accel.decoders.float16 import REQUIRED_PSNR
from accel.decoders.loading import digest, find
from accel.decoders.vit import KIND
from accel.decoders.vit.network import half_of
from accel.errors import UsageError
from accel.io.output import to_grid, to_uint8
from accel.pipeline import decoder_of
from models import DiT_models

CPU = torch.device("cpu")
FLAGS = ["--device", "cpu", "--num-sampling-steps", 2]


def latents(n=2, seed=3):
    return torch.randn(n, 16, 4, 4, generator=torch.Generator().manual_seed(seed))


def refused(path, statistics=None):
    with pytest.raises(UsageError) as caught:
        find(str(path), statistics and str(statistics))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def file(tmp_path):
    return vit_files(tmp_path / "vit")


def test_pixels_are_those_of_float64(file):
    """The decoder passes the float16 check. Batches do not change a picture's bits."""
    space = find(str(file))
    assert (space.channels, space.factor, space.side) == (16, 4, 4)
    z = latents()
    want = 2 * written_out(z) - 1
    assert 0.2 < want.std() < 2
    decoder = Decoder(space, CPU)
    got = decoder.decode(z)
    assert (got - want).norm() < 2e-6 * want.norm()
    half = decoder_of(space, CPU, "fp16")
    pixels = half.decode(z)
    assert half.batch_size == 1  # a CPU decodes one by one
    assert half.precision == "fp16" and half.half.decoder_pred.weight.dtype == torch.float16
    error = (pixels - want).square().mean().sqrt()
    assert 1e-5 < error < 2 / 10 ** (REQUIRED_PSNR / 20)
    for one in (decoder, half):
        assert torch.equal(one.decode(z)[1:], one.decode(z[1:]))
    with torch.inference_mode():
        exact = half_of(decoder.load().network, torch.float32)(z[:1])
    assert (exact - want[:1]).norm() < 2e-6 * want[:1].norm()


@pytest.mark.parametrize("count", (1, 3, 4, 6, 9))
def test_pictures_of_a_batch(count, file):
    """Full batches, a last one that is filled up, and single pictures where few are left."""
    half = decoder_of(find(str(file)), CPU, "fp16").load()
    z = latents(count)
    alone = half.decode(z)
    half.batch_size = 4
    got = half.decode(z)
    assert got.shape == alone.shape and (got - alone).norm() < 1e-3 * alone.norm()


@pytest.mark.gpu
def test_pictures_of_a_batch_on_a_gpu(file):
    """To the bit what each is alone, in a batch or not."""
    half = decoder_of(find(str(file)), torch.device("cuda", 0), "fp16", use_graph=True).load()
    z = latents(21).cuda()
    together = half.decode(z)
    half.batch_size = 1
    assert torch.equal(half.decode(z), together)


def test_levels_are_the_originals():
    """clamp(v)·255, truncated: v → x = 2v - 1 → v loses no bit above 1/4, and below it a level
    within 1e-7 of an edge may move.
    """
    generator = torch.Generator().manual_seed(0)
    edges = (torch.randint(-2, 258, (200_000,), generator=generator) / 255).float()
    off = torch.randint(-8, 9, edges.shape, generator=generator) * 2.0**-24
    v = torch.cat([edges + off, 0.5 + 0.3 * torch.randn(200_000, generator=generator)])
    want = v.clamp(0, 1).mul(255).to(torch.uint8)
    x = (2 * v - 1).expand(1, 3, 1, -1)
    got = to_uint8(x, KIND.to_uint8_range)[0, 0, :, 0]
    near = (v * 255 - (v * 255).round()).abs() < 255e-7
    assert torch.equal(got[v >= 0.25], want[v >= 0.25])
    assert torch.equal(got[~near], want[~near]) and len(want.unique()) == 256
    # a grid rounds
    grid = to_grid(x[..., :1000])[0, :, 0]
    exact = v[:1000].double().clamp(0, 1) * 255
    assert (grid.double() - exact).abs().max() < 0.501


def test_diffusers_class_is_another_layout_and_refused_by_name(file):
    config = dict(_class_name="AutoencoderRAE", decoder_num_attention_heads=4)
    (file.parent / "config.json").write_text(json.dumps(config))
    line = refused(file.parent)
    assert "config.json: contains no decoder of a known kind" in line
    assert line.endswith(", but AutoencoderRAE")


def test_files_in_other_forms(file, tmp_path):
    """safetensors in a folder, a training run's moving average, statistics by channel, other
    colours.
    """
    from safetensors.torch import save_file

    want = Decoder(find(str(file)), CPU).decode(latents())
    folder = tmp_path / "folder"
    shutil.copytree(file.parent, folder)
    (folder / "model.pt").unlink()
    save_file(random_state(), folder / "model.safetensors")
    whole = {f"module.decoder.{name}": value for name, value in random_state().items()}
    whole["module.encoder.weight"] = torch.ones(3)
    torch.save({"ema": whole, "model": {}, "epoch": 3}, file.parent / "training.pt")
    torch.save(random_state() | {"mask_token": torch.ones(1, 1, 48)}, file.parent / "more.pt")
    for path in (folder, file.parent / "training.pt", file.parent / "more.pt"):
        assert torch.equal(Decoder(find(str(path)), CPU).decode(latents()), want)
    assert digest(find(str(folder))) == digest(find(str(file)))
    # of channels alone, of another place
    statistics = random_statistics()
    by_channel = {
        name: value.mean((1, 2), keepdim=True)[None] for name, value in statistics.items()
    }
    torch.save(by_channel, tmp_path / "by_channel.pt")
    other = find(str(file), str(tmp_path / "by_channel.pt"))
    z = latents()
    mean = by_channel["mean"][0]
    var = by_channel["var"][0]
    again = (z * (var + 1e-5).sqrt() + mean - statistics["mean"]) / (
        statistics["var"] + 1e-5
    ).sqrt()
    pixels = Decoder(other, CPU).decode(z)
    assert (pixels - (2 * written_out(again) - 1)).abs().max() < 1e-3
    assert digest(other) != digest(find(str(file)))
    colours = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    (file.parent / "preprocessor_config.json").write_text(json.dumps(colours))
    pixels = Decoder(find(str(file)), CPU).decode(z)
    want = 2 * written_out(z, mean=[0.5] * 3, std=[0.5] * 3) - 1
    assert (pixels - want).norm() < 2e-6 * want.norm()


@pytest.mark.parametrize("mean", [{}, {"mean": None}])
def test_statistics_without_a_mean_have_the_mean_0(mean, file):
    statistics = random_statistics()
    torch.save({"var": statistics["var"], **mean}, file.parent / "stat.pt")
    pixels = Decoder(find(str(file)), CPU).decode(latents())
    # written_out adds the mean of random_statistics
    shifted = latents() - statistics["mean"] / (statistics["var"] + 1e-5).sqrt()
    assert (pixels - (2 * written_out(shifted) - 1)).abs().max() < 1e-3


def test_what_no_file_says_is_printed(tmp_path, capsys):
    sizes = SMALL._replace(width=768, heads=12, depth=1)
    file = vit_files(tmp_path / "wide", sizes)
    (file.parent / "config.json").unlink()
    got = Decoder(find(str(file)), CPU).decode(latents())
    [line] = capsys.readouterr().out.splitlines()
    assert "assuming 12 heads and ImageNet's mean" in line
    assert "put config.json with decoder_num_attention_heads and preprocessor_config.json" in line
    want = 2 * written_out(latents(), sizes) - 1
    assert (got - want).norm() < 2e-6 * want.norm()
    small = vit_files(tmp_path / "small")
    (small.parent / "config.json").unlink()
    assert "the number of heads (None) is unknown" in refused(small)


def test_refusals(file, tmp_path):
    """Each fault is one line, before anything is sampled."""
    state = torch.load(file)
    for changed, words in (
        (
            state | {"decoder_extra.weight": torch.ones(2, 2)},
            "decoder_extra.weight is not a weight",
        ),
        (state | {"decoder_norm.weight": torch.ones(3)}, "decoder_norm.weight is (3,), must be"),
        (state | {"decoder_pos_embed": torch.ones(1, 16, 48)}, "only square grids"),
    ):
        torch.save(changed, file)
        assert words in refused(file)
    lacking = dict(state)
    del lacking["trainable_cls_token"]
    torch.save(lacking, file)
    assert "no trainable_cls_token" in refused(file)
    torch.save({"weight": torch.ones(2)}, file)
    words = "contains no decoder of a known kind (autoencoder_kl, ldm, pixels, vit)"
    assert words in refused(file)
    torch.save(state, file)
    for fact, words in (
        (dict(decoder_hidden_size=96), "has decoder_hidden_size 96, must have 48"),
        (dict(hidden_act="relu"), "has hidden_act relu, must have gelu"),
        (
            dict(decoder_num_attention_heads=5),
            "the number of heads (5) is unknown or does not divide",
        ),
        (dict(image_std=[0.2, 0.2, 0]), "has image_std"),
    ):
        vit_files(file.parent, **fact)
        assert words in refused(file)
    vit_files(file.parent)
    statistics = random_statistics()
    for changed, words in (
        (dict(mean=statistics["mean"]), "lacks var"),
        (statistics | dict(var=-statistics["var"]), "invalid values of var"),
        (statistics | dict(mean=torch.ones(16, 8, 8)), "mean is of shape (16, 8, 8), and the"),
    ):
        torch.save(changed, tmp_path / "wrong.pt")
        message = refused(file, tmp_path / "wrong.pt")
        assert message.startswith("latent_stats=") and words in message
    (file.parent / "stat.pt").unlink()
    assert "put stat.pt next to it, or give latent_stats" in refused(file)


@pytest.fixture
def model():
    return fill(DiT_models["DiT-S/4"](input_size=4, in_channels=16, num_classes=10))


@pytest.fixture
def network(model, tmp_path):
    torch.save(model.state_dict(), tmp_path / "own.pt")
    return ["--ckpt", tmp_path / "own.pt", "--num-classes", 10]


def test_a_grid_rounds(file, network, tmp_path, here):
    """The command and `Sampler.decode` do so; latents of another side are refused."""
    words = ["sample.py", *network, *FLAGS, "--vae", file, "--labels", 7, "--output"]
    assert "ImageNet's mean and std" in succeeds(here(*words, tmp_path / "x.png"))
    succeeds(here(*words, tmp_path / "x.npy", "--output-type", "latent"))
    done = here(*words, tmp_path / "y.png", "--image-size", 32)
    assert "decodes only latents of 4×4" in forks.refused(done) and "px ·" not in done.stdout
    how = dict(num_classes=10, vae=file, device="cpu", num_sampling_steps=2)
    with Sampler(tmp_path / "own.pt", **how) as sampler:
        [picture] = sampler.decode(np.load(tmp_path / "x.npy"))
        with mistake("vae", "8×8"):
            sampler.decode(torch.randn(1, 16, 8, 8))
    v = written_out(torch.from_numpy(np.load(tmp_path / "x.npy"))).clamp(0, 1)
    levels = 255 * v[0].permute(1, 2, 0).numpy()
    assert picture.size == (16, 16) and levels.std() > 20
    assert np.abs(np.asarray(picture) - levels).max() < 0.501
    assert np.array_equal(np.asarray(Image.open(tmp_path / "x.png")), np.asarray(picture))


def test_an_fid_job_truncates(file, model, network, tmp_path, here):
    job = ["--num-fid-samples", 2, "--per-proc-batch-size", 2, "--sample-dir", tmp_path / "samples"]
    words = ["sample_ddp.py", *network, *FLAGS, "--vae", file, "--cfg-scale", 1.5, *job]
    assert here(*words).returncode == 0
    torch.manual_seed(0)
    z = torch.randn(2, 16, 4, 4)
    y = torch.randint(0, 10, (2,))
    with torch.inference_mode():
        v = written_out(upstreams_loop(model, z, y, 2, 1.5))
    want = v.clamp(0, 1).mul(255).permute(0, 2, 3, 1).to(torch.uint8).numpy().astype(int)
    [archive] = (tmp_path / "samples").glob("*.npz")
    off = np.abs(np.load(archive)["arr_0"] - want)
    assert off.max() <= 1 and off.mean() < 0.002 and want.std() > 20
    record = json.loads(next((tmp_path / "samples").glob("*/.job/settings.json")).read_text())
    assert record["--vae (contents)"] == digest(find(str(file)))
