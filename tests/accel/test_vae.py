import json
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from accel import vae
from accel.options import DEMO, UsageError


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
def test_decodes_what_diffusers_decodes_bit_for_bit(change, pickled, tmp_path):
    from diffusers import AutoencoderKL

    theirs = AutoencoderKL(
        **{
            **dict(
                down_block_types=["DownEncoderBlock2D"] * 4,
                up_block_types=["UpDecoderBlock2D"] * 4,
                layers_per_block=1,
                block_out_channels=[8, 8, 16, 16],
                norm_num_groups=4,
                latent_channels=4,
            ),
            **change,
        }
    ).eval()
    with torch.no_grad():
        for value in theirs.parameters():
            value.add_(0.1 * torch.randn_like(value))  # its norms start as the identity
    theirs.save_pretrained(tmp_path, safe_serialization=not pickled)
    latents = torch.randn(2, 4, 8, 8)
    with torch.inference_mode():
        want = torch.cat([theirs.decode(one / 0.18215).sample for one in latents.split(1)])
    assert want.std() > 0.05
    assert torch.equal(vae.decode(vae.load_vae(vae.find_vae(str(tmp_path)), torch.device("cpu")), latents), want)


def test_the_demos_decoder_is_diffusers_bit_for_bit():
    from diffusers import AutoencoderKL

    latents = torch.randn(1, 4, 16, 16)
    with torch.inference_mode():
        want = (
            AutoencoderKL.from_pretrained(DEMO / "vae", torch_dtype=torch.float32)
            .eval()
            .decode(latents / 0.18215)
            .sample
        )
    assert torch.equal(vae.decode(vae.load_vae(vae.find_vae(str(DEMO / "vae")), torch.device("cpu")), latents), want)


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


def test_bad_folders(tiny_vae, tmp_path):
    def error(name):
        with pytest.raises(UsageError) as caught:
            vae.find_vae(str(name))
        assert "--vae" in str(caught.value) and "\n" not in str(caught.value)
        return str(caught.value)

    assert "neither ema nor mse" in error("nowhere")
    assert "must hold config.json" in error(tmp_path)
    (tmp_path / vae.FILES[1]).write_bytes((tiny_vae / vae.FILES[1]).read_bytes()[:-100])
    (tmp_path / "config.json").write_text("{")
    assert "not JSON" in error(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "VQModel"}))
    assert "holds VQModel" in error(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((tiny_vae / "config.json").read_text()) | dict(act_fn="relu"))
    )
    assert "act_fn relu" in error(tmp_path)
    (tmp_path / "config.json").write_text((tiny_vae / "config.json").read_text())
    assert "damaged" in error(tmp_path)
    (tmp_path / vae.FILES[1]).write_bytes((tiny_vae / vae.FILES[1]).read_bytes())
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((tiny_vae / "config.json").read_text()) | dict(layers_per_block=2))
    )
    assert "not those of its config.json" in error(tmp_path)  # already here, before a picture is sampled
    (tmp_path / "config.json").write_text((tiny_vae / "config.json").read_text())
    (tmp_path / vae.FILES[1]).unlink()
    for content in (b"junk", b"", pickle.dumps(print)):
        (tmp_path / vae.PICKLED).write_bytes(content)
        assert "is damaged" in error(tmp_path)
    torch.save(dict(load_file(tiny_vae / vae.FILES[1]), **{"decoder.conv_out.bias": 3}), tmp_path / vae.PICKLED)
    assert "is damaged" in error(tmp_path)


def test_no_network_names_the_folder_to_fill(monkeypatch, tmp_path):
    """The hub is really asked, through a proxy that refuses."""
    monkeypatch.setattr(vae, "ROOT", tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name in ("https_proxy", "HTTPS_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with pytest.raises(UsageError) as caught:
        vae.find_vae("mse")
    message = str(caught.value)
    assert (
        str(tmp_path / "pretrained_models" / "sd-vae-ft-mse") in message
        and vae.FILES[1] in message
        and "\n" not in message
    )
    (tmp_path / "pretrained_models" / "sd-vae-ft-mse").mkdir(parents=True)
    with pytest.raises(UsageError, match="must hold"):  # a local folder goes before the hub
        vae.find_vae("mse")
