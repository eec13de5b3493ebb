import json
import os
import pickle
import shutil
from pathlib import Path

import forks
import pytest
import torch
from conftest import mistake
from hub import Hub
from safetensors.torch import load_file, save_file

from accel.decoders import loading
from accel.errors import UsageError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def refused(name):
    with pytest.raises(UsageError) as caught:
        loading.find(str(name))
    message = str(caught.value)
    assert message.startswith("vae") and "\n" not in message
    return message


@pytest.fixture
def folder(tiny_vae, tmp_path):
    """A VAE's folder that a test may damage."""
    return Path(shutil.copytree(tiny_vae, tmp_path / "vae"))


def test_missing_and_damaged_folders(folder, tmp_path):
    assert "neither ema nor mse" in refused("nowhere")
    os.mkfifo(tmp_path / "pipe")
    assert "neither ema nor mse nor a folder" in refused(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    assert "must contain config.json" in refused(tmp_path / "empty")
    os.truncate(folder / loading.FILES[1], 1000)
    assert "truncated" in refused(folder)
    (folder / loading.FILES[1]).unlink()
    assert "must contain config.json" in refused(folder)
    (folder / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(print, protocol=2))
    assert "would run code (print)" in refused(folder)


def test_weights_of_another_config_or_kind(folder):
    """Found before a picture is sampled. All entries of a config: tests/config/test_bounds.py."""
    config = json.loads((folder / "config.json").read_text())
    wrong = dict(scaling_factor=10**400), dict(norm_num_groups=3), dict(_class_name="VQModel")
    for text in ("[]", "", *(json.dumps(config | entry) for entry in wrong)):
        (folder / "config.json").write_text(text)
        assert "config.json: " in refused(folder)
    (folder / "config.json").write_text(json.dumps(config | dict(layers_per_block=2)))
    message = refused(folder)
    assert loading.FILES[1] in message and "is not a KLDecoder: no decoder.up_blocks" in message
    (folder / "config.json").write_text(json.dumps(config))
    state = load_file(folder / loading.FILES[1])
    (folder / loading.FILES[1]).unlink()
    for wrong in (torch.tensor(3.0), torch.ones(3, dtype=torch.int32)):
        torch.save(state | {"decoder.conv_out.bias": wrong}, folder / "diffusion_pytorch_model.bin")
        assert "decoder.conv_out.bias is" in refused(folder)


@pytest.mark.parametrize("ask", [lambda space: loading.load(space, "cpu"), loading.digest])
@pytest.mark.parametrize("name", loading.FILES)
def test_a_decoder_that_was_changed_since_it_was_opened_is_refused(name, ask, folder):
    """Never half old, half new. Opened again, the new one is taken."""
    found = loading.find(str(folder))
    before = loading.digest(found)
    if name == "config.json":
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | dict(norm_num_groups=8)))
    else:
        other = load_file(folder / name) | {"decoder.conv_out.bias": torch.zeros(3)}
        save_file(other, folder / name, metadata={"format": "pt"})
    with mistake("vae", "changed"):
        ask(found)
    assert loading.digest(loading.find(str(folder))) != before


def test_digest_is_of_the_decoder_and_of_what_its_config_decides(folder):
    want = loading.digest(loading.find(folder))
    state = load_file(folder / loading.FILES[1])
    config = json.loads((folder / "config.json").read_text())
    decoder = {name: tensor for name, tensor in state.items() if "encoder." not in name}
    torch.save(decoder, folder / "diffusion_pytorch_model.bin")
    (folder / loading.FILES[1]).unlink()
    assert loading.digest(loading.find(folder)) == want  # another format, without the encoder
    digests = {want}
    statistics = dict(latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    for other in (
        dict(norm_num_groups=8),
        dict(scaling_factor=0.5),
        dict(shift_factor=0.1),
        statistics,
    ):
        (folder / "config.json").write_text(json.dumps(config | other))
        digests.add(loading.digest(loading.find(folder)))
    assert len(digests) == 5
    (folder / "config.json").write_text(
        json.dumps(config | dict(sample_size=256, force_upcast=False))
    )
    assert loading.digest(loading.find(folder)) == want


def test_fetched_from_the_hub(tiny_vae, tmp_path):
    """A fresh process decodes, because the hub's client reads its environment once."""
    code = (
        "from accel.decoders import loading; loading.FOLDER = loading.Path('no'); "
        "print(loading.digest(loading.find('ema')))"
    )
    environment = dict(HF_HUB_CACHE=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    with Hub("stabilityai/sd-vae-ft-ema", tiny_vae) as hub:
        environment["HF_ENDPOINT"] = hub.url
        done = forks.run(["-c", code], **environment)
    assert done.stdout.strip() == loading.digest(loading.find(tiny_vae)), done.stderr
    assert sorted(hub.asked) == sorted(loading.FILES)
    # cached: the server is gone
    assert forks.run(["-c", code], **environment).stdout == done.stdout
