import argparse
import json
import os
import pickle
import socket
import tempfile
import zipfile

import pytest
import torch
from conftest import mistake
from forks import refused, succeeds
from hub import Hub
from networks import identify, small, to_diffusers, weights_at, write_transformer
from safetensors.torch import save_file
from unprivileged import unprivileged

from accel.checkpoints.loading import find_model
from accel.checkpoints.module import from_module
from accel.errors import UsageError
from accel.families import DEMO
from accel.tensors import digests, tensor_files
from models import DiT_models


@pytest.fixture(scope="module")
def state():
    return small(num_classes=10).state_dict()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path, state):
    """The small DiT in diffusers' layout."""
    folder = tmp_path / "diffusers" / "transformer"
    folder.mkdir(parents=True)
    write_transformer(folder, state, dict(sample_size=8, patch_size=2))
    return folder


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def error(path, ask=find_model):
    with pytest.raises(UsageError) as caught:
        ask(path)
    message = str(caught.value)
    assert "\n" not in message and message.startswith("ckpt")
    return message


def test_plain_legacy_and_safetensors(tmp_path, state, capsys):
    torch.save(state, tmp_path / "a.pt")
    # as written before torch 1.6
    torch.save(state, tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    torch.save({"state_dict": state}, tmp_path / "c.ckpt")
    save_file(state, tmp_path / "d.safetensors")
    # another average: test_training_files.py
    torch.save({"model": state, "args": argparse.Namespace(lr=1e-4)}, tmp_path / "e.pt")
    for name in ("a.pt", "b.pt", "c.ckpt", "d.safetensors", "e.pt"):
        assert same(find_model(tmp_path / name), state), name
    assert 'e.pt: has "model" only' in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_weights_are_memory_mapped(tmp_path, kind):
    """Opening 256 MB of weights must not read them."""
    path = tmp_path / f"large.{kind}"
    content = {"w": torch.ones(64 << 20)}
    torch.save(content, path) if kind == "pt" else save_file(content, path)
    before = rss()
    found = find_model(path)
    assert rss() - before < 50
    assert found["w"][:: 1 << 20].sum() == 64


def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def test_compressed_pt(tmp_path, state):
    """Re-zipped with deflate, mapped bytes are not the tensors'."""
    torch.save(state, tmp_path / "a.pt")
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
        with (
            zipfile.ZipFile(tmp_path / "a.pt") as source,
            zipfile.ZipFile(tmp_path / "b.pt", "w", method) as target,
        ):
            for name in source.namelist():
                target.writestr(name, source.read(name))
        assert same(find_model(tmp_path / "b.pt"), state)


def test_diffusers_layout(tmp_path, folder, state):
    for path in (folder, folder.parent):
        assert same(find_model(path), state)
    plain = folder / "diffusion_pytorch_model.safetensors"
    theirs = tensor_files.read_tensors(plain, "ckpt")
    plain.unlink()
    torch.save(theirs, folder / "diffusion_pytorch_model.bin")
    assert same(find_model(folder), state)
    (folder / "diffusion_pytorch_model.bin").rename(tmp_path / "aside.bin")
    names = sorted(theirs)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for name, part in shards.items():
        save_file({key: theirs[key].clone() for key in part}, folder / name)
    assert "one.safetensors, two.safetensors conflict" in error(folder)
    (tmp_path / "aside.bin").rename(folder / "diffusion_pytorch_model.bin")
    assert same(find_model(folder), state)  # by its name
    (folder / "diffusion_pytorch_model.bin").unlink()
    index = folder / "diffusion_pytorch_model.safetensors.index.fp16.json"
    index.write_text(
        json.dumps({"weight_map": {key: name for name, part in shards.items() for key in part}})
    )
    assert same(find_model(folder), state)
    index = index.rename(folder / "diffusion_pytorch_model.safetensors.index.json")
    assert same(find_model(folder), state)
    (folder / "two.safetensors").unlink()
    assert "lacks two.safetensors" in error(folder)
    for wrong in (
        {"weight_map": {"a": "../../one.safetensors", "b": [3]}},
        {"weight_map": ["one.safetensors"]},
        {},
    ):
        index.write_text(json.dumps(wrong))
        assert "copy it again" in error(folder)


@pytest.mark.parametrize(
    "config, words",
    [
        ("[]", "is not a JSON object; copy it again"),
        ("", "is not a JSON object; copy it again"),
        ('{"sample_size": null}', "sample_size is None, must be"),
    ],
)
def test_damaged_config(folder, config, words):
    (folder / "config.json").write_text(config)
    assert f"config.json: {words}" in error(folder)


def test_a_config_without_a_size_is_of_the_class_default(folder):
    (folder / "config.json").write_text("{}")
    assert find_model(folder)["pos_embed"].shape[1] == (32 // 2) ** 2  # tokens of 32×32 latents


def test_folders_that_are_not_a_dit(tmp_path, folder, state):
    assert "transformer/config.json" in error(tmp_path)
    theirs = {name: tensor.clone() for name, tensor in to_diffusers(state).items()}
    theirs["transformer_blocks.1.norm1.emb.timestep_embedder.linear_1.bias"] += 1
    save_file(theirs, folder / "diffusion_pytorch_model.safetensors")
    assert "copies of emb.timestep_embedder.linear_1.bias differ" in error(folder)
    save_file({"x": torch.ones(2)}, folder / "diffusion_pytorch_model.safetensors")
    assert "not a DiT in diffusers' layout" in error(folder)
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    assert "must contain config.json and" in error(folder)


@pytest.mark.parametrize("name", ["a.pt", "legacy.pt", "c.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.9, 0.999])
def test_truncated(tmp_path, state, name, share):
    path = tmp_path / name
    if name.endswith("pt"):
        torch.save(state, path, _use_new_zipfile_serialization=name == "a.pt")
    else:
        save_file(state, path)
    os.truncate(path, int(path.stat().st_size * share))
    message = error(path)
    assert "truncated" in message and name in message


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


@pytest.mark.parametrize("how", ["zip", "legacy", "pickle"])
def test_code_is_never_run(tmp_path, how, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pt"
    if how == "pickle":
        path.write_bytes(pickle.dumps({"ema": Bomb()}, protocol=2))
    else:
        torch.save({"ema": Bomb()}, path, _use_new_zipfile_serialization=how == "zip")
    message = error(path)
    assert "would run code" in message and "system" in message
    assert not (tmp_path / "exploded").exists()


def test_no_state_dict(tmp_path):
    torch.save([1, 2], tmp_path / "list.pt")
    assert "contains a list" in error(tmp_path / "list.pt")
    torch.save({"step": 7, "name": "x"}, tmp_path / "numbers.pt")
    assert "no state dict" in error(tmp_path / "numbers.pt")
    # text that an unpickler takes for something begun
    for content in (b"hello", b"junk", b"\x89PNG\r\n\x1a\n"):
        (tmp_path / "x.pt").write_bytes(content)
        assert "x.pt: truncated or not a checkpoint" in error(tmp_path / "x.pt")


def test_tensors_that_are_no_weights(tmp_path, state):
    """Refuse integers, complex numbers, a number and an empty tensor in place of weights."""
    ones = torch.ones(4)
    for wrong, words in (
        (ones.int(), "is torch.int32; weights are tensors of floats"),
        (ones.cfloat(), "is torch.complex64; weights are tensors of floats"),
        (ones[0], "is (), must be (32,)"),
        (ones[:0], "is (0,), must be (32,)"),
    ):
        changed = {**state, "final_layer.linear.bias": wrong}
        torch.save({"ema": changed, "args": {"num_heads": 2}}, tmp_path / "a.pt")
        assert f"final_layer.linear.bias {words}" in error(tmp_path / "a.pt", identify)


@pytest.mark.parametrize(
    "shape", [(9,), (1, 9), (1, 8, 216), (2, 64, 216), (1, 0, 216), (1, 64, 216, 1)]
)
def test_malformed_position_table(tmp_path, shape):
    torch.save(
        {**find_model(DEMO / "dit.safetensors"), "pos_embed": torch.ones(shape)}, tmp_path / "a.pt"
    )
    message = error(tmp_path / "a.pt", lambda path: identify(path, "DiT-Demo/2"))
    assert "pos_embed is " in message and str(shape) in message


def test_what_is_never_opened(tmp_path, folder, state):
    """Pipes, sockets, devices, what belongs to another user, and names that no file
    system takes.
    """
    os.mkfifo(tmp_path / "pipe.pt")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "socket.pt"))
        for path in (tmp_path / "pipe.pt", tmp_path / "socket.pt", "/dev/zero"):
            assert "give a file or a folder" in error(path, weights_at)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert "config.json: is a folder, a pipe" in error(folder)
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        for file in ("a.pt", "a.safetensors"):
            torch.save(state, f"{name}/{file}")
            os.chmod(f"{name}/{file}", 0)
            with unprivileged():
                assert f"{file}: Permission denied" in error(f"{name}/{file}")
        os.mkdir(f"{name}/b", 0)
        with unprivileged():
            assert "Permission denied" in error(f"{name}/b")
    assert "File name too long" in error("x" * 300)


def test_which_model_the_weights_fit(tmp_path):
    weights = DEMO / "dit.safetensors"
    for said in ((), ("DiT-Demo/2",), ("DiT-Demo/2", 8)):
        found = identify(weights, *said)
        assert (found.model, found.num_classes, found.latent_size) == ("DiT-Demo/2", 8, 16)
        assert found.null_class and found.learn_sigma
    torch.save({"blocks.0.x": torch.ones(2)}, tmp_path / "x.pt")
    with mistake("ckpt", "x_embedder.proj.weight", "JiT", "Large-DiT"):
        identify(tmp_path / "x.pt", "DiT-S/8")
    flat = DiT_models["DiT-S/8"](input_size=8).state_dict()
    flat["x_embedder.proj.weight"] = flat["x_embedder.proj.weight"].flatten(1)
    torch.save(flat, tmp_path / "flat.pt")
    with mistake("ckpt", "x_embedder.proj.weight", "384", "256"):
        identify(tmp_path / "flat.pt")


@pytest.fixture
def settled(monkeypatch):
    """Every file looks as if it had been written long ago."""
    monkeypatch.setattr(digests, "TIMESTAMP_RESOLUTION_NS", -1)


def test_one_digest_for_every_layout(tmp_path, state, folder):
    torch.save(state, tmp_path / "a.pt")
    want = weights_at(tmp_path / "a.pt").digest()
    assert len(want) == 16 and weights_at(folder).digest() == want
    module = small(num_classes=10)
    assert from_module(module)[0].tensors.digest() == want
    module.pos_embed.data += 0.1
    assert from_module(module)[0].tensors.digest() != want


@pytest.mark.parametrize(
    "name, change, same",
    [
        ("pos_embed", lambda table: table + 1e-6, True),  # an average's rounding
        ("pos_embed", lambda table: table.bfloat16(), True),
        ("pos_embed", lambda table: table + 1e-2, False),
        ("pos_embed", lambda table: table.flip(1), False),
        ("pos_embed", lambda table: table * float("nan"), False),
        ("pos_embed", lambda table: table[0], False),
        ("blocks.1.attn.qkv.weight", lambda weight: weight + 1e-6, False),
    ],
)
def test_a_digest_counts_a_position_table_that_was_trained(name, change, same, tmp_path, state):
    """A sine-cosine table does not count: diffusers' layout lacks it, and any size has its own."""
    digests = []
    for number, content in enumerate((state, {**state, name: change(state[name])})):
        save_file(content, tmp_path / f"{number}.safetensors")
        digests.append(weights_at(tmp_path / f"{number}.safetensors").digest())
    first, second = digests
    assert (first == second) == same


def test_a_digest_follows_a_file_that_is_changed(tmp_path, state, settled):
    path = tmp_path / "a.safetensors"
    save_file(state, path)
    os.utime(path, (1e9, 1e9))
    want = weights_at(path).digest()
    assert weights_at(path).digest() == want
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"1234")
    os.utime(path, (1e9, 1e9))  # the same name, size, inode and time of change
    assert weights_at(path).digest() != want


def test_digest_of_weights_that_are_replaced_meanwhile(tmp_path, state, settled):
    """What was opened is hashed, and is not kept as the digest of what lies there now."""
    path = tmp_path / "a.safetensors"
    save_file(state, path)
    first = weights_at(path)
    assert first.state.keys() == state.keys()
    other = tmp_path / "b.safetensors"
    save_file({name: tensor + 1 for name, tensor in state.items()}, other)
    want = weights_at(other).digest()
    other.rename(path)
    assert first.digest() != want == weights_at(path).digest()


def test_a_hub_id_of_pickles(tmp_path, folder, run):
    """Only what is needed is fetched. Pipelines, and what was fetched before: test_doors.py."""

    def sample(ckpt):
        flags = ["--model", "DiT-Demo/2", "--num-sampling-steps", 2, "--device", "cpu"]
        place = dict(HF_HUB_CACHE=str(tmp_path / "hub"), HF_ENDPOINT=hub.url)
        return run("sample.py", *flags, "--ckpt", ckpt, "--output", tmp_path / "x.png", **place)

    theirs = to_diffusers(find_model(DEMO / "dit.safetensors"))
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    torch.save(theirs, folder / "diffusion_pytorch_model.bin")
    (folder / "diffusion_pytorch_model.fp16.bin").write_bytes(b"not asked for")
    (folder / "config.json").write_text(json.dumps(dict(sample_size=16, patch_size=2)))
    with Hub("someone/dit-demo", folder.parent) as hub:
        succeeds(sample("someone/dit-demo"))
        assert sorted(hub.asked) == [
            "transformer/config.json",
            "transformer/diffusion_pytorch_model.bin",
        ]
        line = refused(sample("someone/nothing"))
        assert "--ckpt someone/nothing: not here" in line and "404" in line
    assert "by other means and give its folder" in refused(sample("someone/else"))
