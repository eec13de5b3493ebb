import json
import os
import pickle
import shutil
from pathlib import Path

import forks
import pytest
import torch
from hub import Hub
from safetensors.torch import load_file, save_file
from unprivileged import unprivileged

from accel.errors import UsageError
from accel.latents import files


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def refused(name, function=lambda name: files.find(str(name))):
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
    assert files.find(str(folder.parent)).decoder == folder == files.find(str(folder)).decoder


def test_missing_and_damaged_folders(folder, tmp_path):
    assert "neither ema nor mse" in refused("nowhere")
    assert "neither ema nor mse" in refused(folder / "config.json")
    (tmp_path / "empty").mkdir()
    assert "must hold config.json" in refused(tmp_path / "empty")
    weights, content = folder / files.FILES[1], (folder / files.FILES[1]).read_bytes()
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
        "block_out_channels": [8, "8", [], [8] * 9, [8, 8, 16, 0], [8, 8, 16, "16"], [[8]] * 4, [10**9] * 4, None],
        "layers_per_block": [0, -1, "1", 1.0, True, None, [1], 10_000_000],
        "norm_num_groups": [0, 3, "4", 4.0, True],
        "latent_channels": ["4", 0, 10**9],
        "out_channels": [1, "3"],
        "up_block_types": ["UpDecoderBlock2D", ["UpDecoderBlock2D"] * 3, [{}] * 4, ["UpBlock2D"] * 4],
        "scaling_factor": [0, -0.18215, float("nan"), float("inf"), 10**400, 1e-300, "0.18215", [0.18215], True, None],
        "shift_factor": [float("nan"), float("-inf"), 10**400, "0", [0.0], False],
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


def test_wrong_statistics_in_config(folder):
    config, ones, nan = json.loads((folder / "config.json").read_text()), [1.0] * 4, float("nan")
    wrong = [(ones, std, "latents_std") for std in (None, ones[1:], [*ones, 1.0], [0.0] * 4, ["1"] * 4, [nan] * 4, 1.0)]
    wrong += [(mean, ones, "latents_mean") for mean in (None, ones[1:], [nan] * 4, [[1.0]] * 4, "1111")]
    for mean, std, entry in wrong:
        (folder / "config.json").write_text(json.dumps(config | dict(latents_mean=mean, latents_std=std)))
        assert f"config.json: {entry} is" in refused(folder)
    (folder / "config.json").write_text(json.dumps(config | dict(latents_mean=ones, latents_std=ones, shift_factor=1)))
    assert "config.json: shift_factor is 1" in refused(folder)


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
    state = load_file(folder / files.FILES[1])
    (folder / files.FILES[1]).unlink()
    for wrong in (3, torch.tensor(3.0), torch.ones(3, dtype=torch.int32)):
        torch.save(state | {"decoder.conv_out.bias": wrong}, folder / "diffusion_pytorch_model.bin")
        assert "decoder.conv_out.bias is" in refused(folder)


def test_a_run_opens_the_weights_once(folder, monkeypatch):
    opened, read = [], files.read_tensors
    monkeypatch.setattr(files, "read_tensors", lambda *a: opened.append(a) or read(*a))
    found = files.find(str(folder))
    first = files.load(found, "cpu")
    want = files.digest(found)
    assert len(opened) == 1
    # What is loaded is the caller's: writing to it changes neither the file nor the next load.
    first.decoder.conv_out.bias.zero_()
    again = files.load(found, "cpu")
    assert again.decoder.conv_out.bias.any() and len(opened) == 1 and files.digest(found) == want
    state = load_file(folder / files.FILES[1])
    save_file(state | {"decoder.conv_out.bias": torch.zeros(3)}, folder / files.FILES[1], metadata={"format": "pt"})
    assert not files.load(found, "cpu").decoder.conv_out.bias.any()  # another file
    assert len(opened) == 2 and files.digest(found) != want


def test_digest_is_of_the_decoder_and_of_what_its_config_decides(folder):
    want = files.digest(files.find(folder))
    state, config = load_file(folder / files.FILES[1]), json.loads((folder / "config.json").read_text())
    decoder = {name: tensor for name, tensor in state.items() if "encoder." not in name}
    torch.save(decoder, folder / "diffusion_pytorch_model.bin")
    (folder / files.FILES[1]).unlink()
    assert files.digest(files.find(folder)) == want  # another format, without the encoder
    digests = {want}
    statistics = dict(latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    for other in (dict(norm_num_groups=8), dict(scaling_factor=0.5), dict(shift_factor=0.1), statistics):
        (folder / "config.json").write_text(json.dumps(config | other))
        digests.add(files.digest(files.find(folder)))
    assert len(digests) == 5
    (folder / "config.json").write_text(json.dumps(config | dict(sample_size=256, force_upcast=False)))
    assert files.digest(files.find(folder)) == want


def test_no_network_names_the_folder_to_fill(monkeypatch, tmp_path):
    """The hub is really asked, through a proxy that refuses."""
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name in ("https_proxy", "HTTPS_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    message = refused("mse")
    assert f"put config.json and {files.FILES[1]}" in message and str(tmp_path / "sd-vae-ft-mse") in message
    (tmp_path / "sd-vae-ft-mse").mkdir(parents=True)
    assert "must hold" in refused("mse")  # a local folder goes before the hub


def test_fetched_from_the_hub(tiny_vae, tmp_path):
    """In a fresh process, because the hub's client reads its environment once."""
    code = (
        "from accel.latents import files; files.FOLDER = files.Path('nowhere'); print(files.digest(files.find('ema')))"
    )
    environment = dict(HF_HUB_CACHE=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    with Hub("stabilityai/sd-vae-ft-ema", tiny_vae) as hub:
        environment["HF_ENDPOINT"] = hub.url
        done = forks.run(["-c", code], **environment)
    assert done.stdout.strip() == files.digest(files.find(tiny_vae)), done.stderr
    assert sorted(hub.asked) == sorted(files.FILES)
    assert forks.run(["-c", code], **environment).stdout == done.stdout  # cached: the server is gone
