import argparse

import numpy as np
import pytest
import torch
from conftest import fill
from forks import refused, succeeds
from networks import write_transformer

from accel.families import DEMO, constructor_of
from accel.families.dit.network import DiT_models
from download import find_model

CONVERT = "scripts/convert_checkpoint.py"


def test_round_trip_from_all_three(weights, tmp_path, here):
    want = find_model(weights)
    at = tmp_path / "a"
    at.mkdir()
    write_transformer(at, want, dict(sample_size=16, num_embeds_ada_norm=8))
    for name in ("b.pt", "c.safetensors", "d.pt"):
        text = succeeds(here(CONVERT, "--ckpt", at, "--output", tmp_path / name))
        assert f"{len(want)} tensors" in text and "read back equal" in text
        at = tmp_path / name
    got = find_model(at)
    assert got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in want)


TRAINED = {  # arguments of training
    "SiT-S/8": dict(
        model="SiT-S/8", path_type="Linear", prediction="velocity", num_classes=1000, image_size=128
    ),
    "REPA-SiT-S/8": dict(
        model="SiT-S/8", path_type="linear", prediction="v", num_classes=1000, enc_type="dinov2"
    ),
    "DiT-S/8": dict(model="DiT-S/8", num_classes=1000, image_size=128, vae="mse"),
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_training_file_keeps_its_kind(name, tmp_path, here):
    """Through both files and back, with no flag: the same latents, of the original file
    and of each conversion.
    """
    state = fill(constructor_of(name)(input_size=16, learn_sigma="SiT" not in name)).state_dict()
    extra = {"projectors.0.0.weight": torch.ones(2, 2)} if "REPA" in name else {}
    content = {
        "model": {},
        "ema": {**state, **extra},
        "opt": {},
        "args": argparse.Namespace(**TRAINED[name]),
    }
    torch.save(content, tmp_path / "0.pt")
    flags = [
        "--labels",
        3,
        980,
        "--num-sampling-steps",
        4,
        "--device",
        "cpu",
        "--output-type",
        "latent",
    ]
    found = []
    for number, target in enumerate((None, "1.safetensors", "2.pt", "3.safetensors")):
        ckpt = tmp_path / (target or "0.pt")
        if target:
            source = tmp_path / (f"{number - 1}.pt" if number != 2 else "1.safetensors")
            text = succeeds(here(CONVERT, "--ckpt", source, "--output", ckpt))
            assert f"{name}, {len(state)} tensors" in text
            assert ("left out 1 entries that only training needs" in text) == bool(
                extra and number == 1
            )
        text = succeeds(here("sample.py", "--ckpt", ckpt, *flags, "--output", tmp_path / "x.npy"))
        assert f"\n{name} · 128 px" in f"\n{text}" and "names no family" not in text
        found.append(np.load(tmp_path / "x.npy"))
    assert all(np.array_equal(one, found[0]) for one in found[1:]) and abs(found[0]).max() > 0.1
    facts = torch.load(tmp_path / "2.pt", weights_only=True)
    assert facts["ema"].keys() == state.keys()
    assert facts["metadata"]["family"] == name.rpartition("-S/8")[0].split("-SiT")[0]
    assert facts["metadata"].get("vae") == TRAINED[name].get("vae")


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bits_are_kept(kind, tmp_path, here):
    state = fill(DiT_models["DiT-S/8"](input_size=16, depth=1)).state_dict()
    state = {name: one.to(kind) if one.ndim == 2 else one for name, one in state.items()}
    torch.save({"ema": state, "args": argparse.Namespace(num_heads=6)}, tmp_path / "0.pt")
    for source, target in (("0.pt", "1.safetensors"), ("1.safetensors", "2.pt")):
        succeeds(here(CONVERT, "--ckpt", tmp_path / source, "--output", tmp_path / target))
    again = find_model(tmp_path / "2.pt")
    assert again.keys() == state.keys()
    assert all(again[name].dtype == one.dtype for name, one in state.items())
    name = "blocks.0.mlp.fc1.weight"
    assert torch.equal(again[name].float(), state[name].float())
    state[name] = torch.full(state[name].shape, float("nan")).to(kind)
    torch.save({"ema": state, "args": argparse.Namespace(num_heads=6)}, tmp_path / "0.pt")
    error = refused(here(CONVERT, "--ckpt", tmp_path / "0.pt", "--output", tmp_path / "3.pt"))
    assert f"{name} has values that are not finite" in error


@pytest.mark.parametrize(
    "name",
    ["there.pt", ".pt", "folder", "/proc/x.pt", "x" * 300, "\udcff.pt", "\udcff.safetensors"],
)
def test_bad_input(name, tmp_path, monkeypatch, here):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.pt").touch()
    error = refused(here(CONVERT, "--ckpt", DEMO / "dit.safetensors", "--output", name))
    assert "--output" in error
    assert [file.name for file in tmp_path.iterdir()] == ["there.pt"]
