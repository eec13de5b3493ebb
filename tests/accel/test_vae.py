import json
import os
import pickle
import shutil
from pathlib import Path

import forks
import numpy as np
import pytest
import torch
from hub import Hub
from PIL import Image
from safetensors.torch import load_file, save_file
from unprivileged import unprivileged

from accel import vae
from accel.errors import UsageError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("n", [1, 3, 4, 5, 8])
def test_grid_is_torchvisions_save_image(tmp_path, n):
    from torchvision.utils import save_image

    pixels = torch.randn(n, 3, 24, 16, generator=torch.Generator().manual_seed(n))
    pixels[0, :, 0, :4] = torch.tensor([-1.0, 1.0, 0.0, 1 / 255])
    save_image(pixels, tmp_path / "theirs.png", nrow=4, normalize=True, value_range=(-1, 1))
    assert np.array_equal(np.asarray(Image.open(tmp_path / "theirs.png")), vae.to_grid(pixels).numpy())


def test_to_uint8_truncates_as_fid_jobs_do():
    levels = torch.arange(256.0)
    exact = (levels - 127.5) / 127.5
    got = vae.to_uint8(exact.view(1, 1, 16, 16).expand(1, 3, 16, 16))
    assert got.shape == (1, 16, 16, 3) and got.dtype == torch.uint8
    assert (got[0, ..., 0].flatten().int() - levels.int()).abs().max() <= 1
    assert vae.to_uint8(torch.tensor([-9.0, 9.0]).view(1, 1, 1, 2).expand(1, 3, 1, 2)).tolist() == [
        [[[0] * 3, [255] * 3]]
    ]


def test_decode_scales_and_does_not_depend_on_the_batch(tiny_vae):
    decoder = vae.load_vae(vae.find_vae(str(tiny_vae)), torch.device("cpu"))
    latents = torch.randn(3, 4, 8, 8)
    pixels = vae.decode(decoder, latents)
    assert pixels.shape == (3, 3, 64, 64) and not any(p.requires_grad for p in decoder.parameters())
    assert torch.equal(pixels[1:2], vae.decode(decoder, latents[1:2]))
    with torch.no_grad():
        assert torch.allclose(pixels, decoder(latents / 0.18215), atol=1e-5)


ARCHITECTURES = {
    "sd-vae-ft in small": {},
    "deeper, without attention": dict(
        layers_per_block=2, block_out_channels=[8, 16, 12, 12], mid_block_add_attention=False
    ),
    "without the convolution before": dict(use_post_quant_conv=False, use_quant_conv=False),
}


@pytest.mark.parametrize("change", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize("pickled", [False, True])
def test_decodes_what_diffusers_decodes_bit_for_bit(change, pickled, tmp_path, tiny_vae):
    from diffusers import AutoencoderKL

    config = AutoencoderKL.load_config(tiny_vae)
    theirs = AutoencoderKL.from_config({**config, **change}).eval()
    with torch.no_grad():
        for value in theirs.parameters():
            value.add_(0.1 * torch.randn_like(value))  # its norms start as the identity
    theirs.save_pretrained(tmp_path, safe_serialization=not pickled)
    latents = torch.randn(2, 4, 8, 8)
    with torch.inference_mode():
        want = torch.cat([theirs.decode(one / 0.18215).sample for one in latents.split(1)])
    assert want.std() > 0.05
    assert torch.equal(vae.decode(vae.load_vae(vae.find_vae(str(tmp_path)), torch.device("cpu")), latents), want)


def test_deprecated_attention_names_load(tiny_vae, tmp_path):
    """The published sd-vae-ft-* files name the attention's projections query, key, value and proj_attn."""
    names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    state = load_file(tiny_vae / vae.FILES[1])
    old = {}
    for key, value in state.items():
        for new, name in names.items():
            key = key.replace(f"attentions.0.{new}.", f"attentions.0.{name}.")
        old[key] = value
    assert old.keys() != state.keys()
    save_file(old, tmp_path / vae.FILES[1], metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((tiny_vae / "config.json").read_text())
    latents = torch.randn(1, 4, 4, 4)
    a, b = (
        vae.decode(vae.load_vae(vae.find_vae(str(folder)), torch.device("cpu")), latents)
        for folder in (tiny_vae, tmp_path)
    )
    assert torch.equal(a, b)


def refused(name, function=lambda name: vae.find_vae(str(name))):
    with pytest.raises(UsageError) as caught:
        function(name)
    message = str(caught.value)
    assert message.startswith("vae") and "\n" not in message
    return message


@pytest.fixture
def folder(tiny_vae, tmp_path):
    """A VAE's folder that a test may damage."""
    return Path(shutil.copytree(tiny_vae, tmp_path / "vae"))


def test_a_pipelines_root(folder):
    (folder.parent / "model_index.json").write_text("{}")
    assert vae.find_vae(str(folder.parent)) == folder == vae.find_vae(str(folder))


def test_missing_and_damaged_folders(folder, tmp_path):
    assert "neither ema nor mse" in refused("nowhere")
    assert "neither ema nor mse" in refused(folder / "config.json")
    (tmp_path / "empty").mkdir()
    assert "must hold config.json" in refused(tmp_path / "empty")
    weights, content = folder / vae.FILES[1], (folder / vae.FILES[1]).read_bytes()
    for share in (0, 0.1, 0.9):
        weights.write_bytes(content[: int(share * len(content))])
        assert "truncated" in refused(folder)
    weights.unlink()
    assert "must hold config.json" in refused(folder)
    for broken in (b"junk", b""):
        (folder / "diffusion_pytorch_model.bin").write_bytes(broken)
        assert "truncated" in refused(folder)
    (folder / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(print, protocol=2))
    assert "would run code (print)" in refused(folder)


@pytest.mark.parametrize(
    "entry, values",
    {
        "act_fn": ["relu", None, 3],
        "block_out_channels": [8, "8", [8, 8, 16], [8, 8, 16, 0], [8, 8, 16, "16"], [[8]] * 4, [10**9] * 4, None],
        "layers_per_block": [0, -1, "1", 1.0, True, None, [1], 10_000_000],
        "norm_num_groups": [0, 3, "4", 4.0, True],
        "latent_channels": [16, "4"],
        "up_block_types": ["UpDecoderBlock2D", ["UpDecoderBlock2D"] * 3, [{}] * 4],
        "use_post_quant_conv": ["yes", 1, None],
        "mid_block_add_attention": [0, "no"],
    }.items(),
)
def test_wrong_entries_and_types_in_config(folder, entry, values):
    config = json.loads((folder / "config.json").read_text())
    for value in values:
        (folder / "config.json").write_text(json.dumps(config | {entry: value}))
        message = refused(folder)
        assert "config.json" in message and (entry in message or "num_groups" in message), value


def test_what_is_never_opened(folder, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "neither ema nor mse nor a folder" in refused(tmp_path / "pipe")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert "config.json: is a folder, a pipe" in refused(folder)
    tmp_path.chmod(0o700 if os.geteuid() == 0 else 0)
    with unprivileged():
        assert "Permission denied" in refused(folder)
    tmp_path.chmod(0o700)


def test_weights_of_another_config_or_kind(folder):
    """Found before a picture is sampled."""
    config = json.loads((folder / "config.json").read_text())
    for text in ("[]", "", "{}", '{"_class_name": "VQModel"}'):
        (folder / "config.json").write_text(text)
        assert "config.json" in refused(folder)
    (folder / "config.json").write_text(json.dumps(config | dict(layers_per_block=2)))
    assert "not those of config.json" in refused(folder)
    (folder / "config.json").write_text(json.dumps(config))
    state = load_file(folder / vae.FILES[1])
    (folder / vae.FILES[1]).unlink()
    for wrong in (3, torch.tensor(3.0), torch.ones(3, dtype=torch.int32)):
        torch.save(state | {"decoder.conv_out.bias": wrong}, folder / "diffusion_pytorch_model.bin")
        assert "decoder.conv_out.bias is" in refused(folder)


def test_a_run_opens_the_weights_once(folder, monkeypatch):
    opened, read = [], vae.read_tensors
    monkeypatch.setattr(vae, "read_tensors", lambda *a: opened.append(a) or read(*a))
    found = vae.find_vae(str(folder))
    first = vae.load_vae(found, "cpu")
    want = vae.digest(found)
    assert len(opened) == 1
    # What is loaded is the caller's: writing to it changes neither the file nor the next load.
    first.decoder.conv_out.bias.zero_()
    again = vae.load_vae(found, "cpu")
    assert again.decoder.conv_out.bias.any() and len(opened) == 1 and vae.digest(found) == want
    state = load_file(folder / vae.FILES[1])
    save_file(state | {"decoder.conv_out.bias": torch.zeros(3)}, folder / vae.FILES[1], metadata={"format": "pt"})
    assert not vae.load_vae(found, "cpu").decoder.conv_out.bias.any()  # another file
    assert len(opened) == 2 and vae.digest(found) != want


def test_digest_is_of_the_decoder(folder):
    want = vae.digest(folder)
    state = load_file(folder / vae.FILES[1])
    torch.save(
        {name: tensor for name, tensor in state.items() if "encoder." not in name},
        folder / "diffusion_pytorch_model.bin",
    )
    (folder / vae.FILES[1]).unlink()
    assert vae.digest(folder) == want  # another format, without the encoder


def test_no_network_names_the_folder_to_fill(monkeypatch, tmp_path):
    """The hub is really asked, through a proxy that refuses."""
    monkeypatch.setattr(vae, "FOLDER", tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name in ("https_proxy", "HTTPS_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    message = refused("mse")
    assert f"put config.json and {vae.FILES[1]}" in message and str(tmp_path / "sd-vae-ft-mse") in message
    (tmp_path / "sd-vae-ft-mse").mkdir(parents=True)
    assert "must hold" in refused("mse")  # a local folder goes before the hub


def test_fetched_from_the_hub(tiny_vae, tmp_path):
    """In a fresh process, because the hub's client reads its environment once."""
    code = "from accel import vae; vae.FOLDER = vae.Path('nowhere'); print(vae.digest(vae.find_vae('ema')))"
    environment = dict(HF_HUB_CACHE=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    with Hub("stabilityai/sd-vae-ft-ema", tiny_vae) as hub:
        environment["HF_ENDPOINT"] = hub.url
        done = forks.run(["-c", code], **environment)
    assert done.stdout.strip() == vae.digest(tiny_vae), done.stderr
    assert sorted(hub.asked) == sorted(vae.FILES)
    assert forks.run(["-c", code], **environment).stdout == done.stdout  # cached: the server is gone
