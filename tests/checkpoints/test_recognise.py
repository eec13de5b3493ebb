"""Sizes, classes and heads of a file: used, or assumed and printed with the flag that changes it.
Arguments of training and families: test_arguments.py.
"""

import argparse
from dataclasses import replace

import pytest
import torch
from conftest import mistake
from forks import refused, succeeds
from networks import build, identify, opened, recognise, recognised, run_with

from accel.checkpoints import Checkpoint
from accel.config.options import Options
from accel.errors import InputRef
from accel.families import DEMO, constructor_of
from accel.tensors.shapes import shapes_only
from scripts.convert_checkpoint import facts_of

NO_FAMILY = "own.pt: names no family, taken for a DiT (noise)"
HEADS = (
    "own.pt: specifies no number of heads, taken for 6, as models of its depth and width have; if"
)
OTHER_MODEL = "own.pt: specifies model DiT-S/4, and its entries are of DiT-S/2"
CLASSES = "own.pt: 1000 classes and the null class (without a null class it is --num-classes 1001)"


def state_of(name, **arguments):
    """Return a state dict without values."""
    with shapes_only():
        return constructor_of(name)(**arguments).state_dict()


@pytest.mark.parametrize(
    "metadata, given, lines",
    [
        ({}, (), (NO_FAMILY, HEADS, CLASSES)),
        ({}, (None, 1000), (NO_FAMILY, HEADS)),
        (dict(num_heads=6), (), (NO_FAMILY, CLASSES)),
        (dict(num_classes=1000), (), (NO_FAMILY, HEADS)),
        (dict(family="DiT"), (), (HEADS, CLASSES)),
        (dict(model="DiT-S/2"), (), ()),
        (dict(model="DiT-Tiny/2"), (), (HEADS, CLASSES)),
        (dict(model="DiTs"), (), (NO_FAMILY, HEADS, CLASSES)),
        (dict(model="some name"), (), (NO_FAMILY, HEADS, CLASSES)),
        (dict(model="DiT-S/4"), (), (OTHER_MODEL, HEADS, CLASSES)),
        ({}, ("DiT-S/2",), ()),
    ],
)
def test_every_assumption_is_a_line(metadata, given, lines, capsys):
    found = recognised("own.pt", state_of("DiT-S/2"), metadata, *given)
    spec = found.spec
    assert (spec.model, spec.num_heads, spec.num_classes) == ("DiT-S/2", 6, 1000)
    printed = [f"own.pt: {found.family_notice}"] if found.family_notice else []
    printed += capsys.readouterr().out.splitlines()
    assert len(printed) == len(lines)
    assert all(line.startswith(want) for line, want in zip(printed, lines))


def test_a_fixed_variance_is_the_larger_one():
    """Sampling uses the larger variance, so a file with sigma_small is refused."""
    state = state_of("DiT-S/2", learn_sigma=False)
    facts = dict(learn_sigma=False, sigma_small=False)
    assert not recognise("own.pt", state, facts, "DiT-S/2").learn_sigma
    with mistake("ckpt", "sigma_small"):
        recognise("own.pt", state, dict(facts, sigma_small=True), "DiT-S/2")


@pytest.mark.parametrize(
    "model, flags", [(None, "`model=REPA-SiT-XL/2` or `model=SiT-XL/2`"), ("SiT-B/4", "")]
)
def test_any_model_of_a_family_names_the_family_of_an_unusual_size(model, flags, capsys):
    state = state_of("SiT-Demo/2", hidden_size=48, depth=2, num_heads=2)
    found = recognised("own.pt", state, dict(num_heads=2), model)
    name = "SiT" if model else "DiT"
    assert (found.spec.model, found.spec.family.name) == (f"{name}-2x48/2", name)
    printed = capsys.readouterr().out
    if flags:
        assert found.family_notice == f"{NO_FAMILY[8:]}; if it is not: {flags}"
    else:
        assert (
            "own.pt: contains the weights of SiT-2x48/2; --model SiT-B/4 only sets the family"
            in printed
        )


def test_a_label_table_of_one_row_has_no_null_class(capsys):
    state = build("DiT-Demo/2", num_classes=0).state_dict()
    found = recognise("own.pt", state, {})
    assert (found.num_classes, found.null_class) == (1, False)
    assert "own.pt: one class and no null class\n" in capsys.readouterr().out


def test_weights_that_ship_are_known_by_any_path(monkeypatch, capsys):
    """No line is needed."""
    monkeypatch.chdir(DEMO.parent)
    for path in ("demo/sit.safetensors", "demo/../demo/sit.safetensors", DEMO / "sit.safetensors"):
        assert identify(path).model == "SiT-Demo/2"
        assert capsys.readouterr().out == ""
    published = recognise("DiT-XL-2-256x256.pt", state_of("DiT-XL/2"), {})
    assert published.model == "DiT-XL/2" and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "said, decoder",
    [
        ("mse", "mse"),
        ("stabilityai/sd-vae-ft-mse", "mse"),
        ("sd-vae-ft-ema", "ema"),
        ("stabilityai/sdxl-vae", "stabilityai/sdxl-vae"),
        ("sdxl", "sdxl"),
    ],
)
def test_the_decoder_that_a_file_names_is_believed(said, decoder):
    spec = recognise("own.pt", state_of("DiT-S/2"), dict(vae=said), "DiT-S/2")
    source = Checkpoint(InputRef("own.pt"), spec, None)
    for given, chosen in ((None, decoder), ("ema", "ema")):
        assert run_with(source, vae=given).settings.vae == chosen
    assert facts_of(spec)["vae"] == said  # a converted file specifies it too
    there = replace(spec, vae="/somebody/decoder")  # but no path of this machine
    assert facts_of(there)["vae"] == "decoder"


def test_a_decoder_that_is_not_here_is_refused_by_name(tmp_path, tiny_vae, here):
    """Training arguments name a decoder that is not published: --vae must name its files."""
    state = build("DiT-Demo/2").state_dict()
    torch.save({"ema": state, "args": argparse.Namespace(vae="sdxl")}, tmp_path / "x.pt")
    command = ["sample.py", "--model", "DiT-Demo/2", "--ckpt", tmp_path / "x.pt"]
    command += ["--device", "cpu", "--num-sampling-steps", 1, "--output"]
    line = refused(here(*command, tmp_path / "x.png"))
    assert "x.pt: decodes with sdxl unless you give --vae; --vae sdxl: neither ema nor" in line
    succeeds(here(*command, tmp_path / "x.png", "--vae", tiny_vae))
    succeeds(here(*command, tmp_path / "x.npy", "--output-type", "latent"))


@pytest.mark.parametrize("size, is_said", [(128, False), (16, False), (256, True), (None, False)])
def test_a_decoder_of_another_size_is_a_line(size, is_said, tmp_path, capsys):
    """The position table is of 16 by 16 latents. Some programs call their side image_size."""
    arguments = dict(num_heads=3, num_classes=8, image_size=size)
    torch.save({"ema": build("DiT-Demo/2").state_dict(), "args": arguments}, tmp_path / "x.pt")
    how = dict(model="DiT-Demo/2", device="cpu", output_type="latent")
    assert opened(Options(ckpt=tmp_path / "x.pt", **how)).settings.image_size == 128
    line = (
        f"{tmp_path}/x.pt: specifies image_size 256, and this decoder makes 128 px of its latents of "
        "side 16; if it has another: --vae NAME\n"
    )
    assert capsys.readouterr().out == line * is_said


def test_the_number_of_heads_is_a_flag(tmp_path):
    """The flag replaces an assumed number, and never contradicts the file."""
    plain = build("DiT-Demo/2").state_dict()
    torch.save(plain, tmp_path / "x.pt")
    torch.save({"ema": plain, "args": dict(num_heads=6)}, tmp_path / "y.pt")
    for heads, number in ((None, 3), (3, 3), (6, 6)):
        assert identify(tmp_path / "x.pt", "DiT-Demo/2", None, heads).num_heads == number
    with mistake("num_heads", "3", "6"):
        identify(tmp_path / "y.pt", "DiT-Demo/2", None, 3)
