"""--like: a picture's settings make its pixels again."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from conftest import fill
from forks import refused, succeeds
from jobs import run
from PIL import Image, PngImagePlugin
from test_guide_files import write_jit, write_rae
from test_lightning_dit import build as build_lightning
from test_lightning_files import SD, as_file

from accel.config.options import Options
from accel.config.rules import Request
from accel.io.output import TEXT_KEY
from accel.jobs.grid import digests_of
from accel.run.opening import open_run
from models import DiT_models

CPU = "--device", "cpu"


def record_in(path):
    return json.loads(Image.open(path).info[TEXT_KEY])


def same(*paths):
    """Whether pictures have the same pixels, which are not all equal."""
    first, *others = (np.asarray(Image.open(path)) for path in paths)
    return first.std() > 1 and all(np.array_equal(first, other) for other in others)


@pytest.fixture
def again(here, tmp_path, demo):
    """Repeat a picture of `demo` with flags → the new picture."""

    def again(path, *flags, files=demo[2:]):
        output = () if "--output" in flags else ("--output", tmp_path / "again.png")
        succeeds(here("sample.py", "--like", path, *files, *flags, *output))
        return tmp_path / "again.png"

    return again


def test_grids_and_single_pictures_of_seeds_and_grids(here, demo, again, tmp_path):
    flags = *demo, "--labels", 1, 5, 3, "--num-sampling-steps", 3, "--sampler", "ddim", "--eta", 0.5
    seeds = *flags, "--seeds", 4, 7, "--cfg-scale", 2, "--batch-size", 2
    succeeds(here("sample.py", *seeds, "--output", f"{tmp_path}/x/"))
    succeeds(here("sample.py", *seeds, "--output", tmp_path / "x.png"))
    succeeds(here("sample.py", *flags, "--grids", 3, "--output", tmp_path / "g.png"))
    single = tmp_path / "x" / "seed-7" / "001-5-sea.png"
    for path in (tmp_path / "x-seed-7.png", tmp_path / "g_2.png", single):
        assert same(path, again(path))
        assert same(path, again(again(path)))  # its own copy
        made = record_in(path)
        assert (
            made["files"]["ckpt"]["name"] == "demo.safetensors"
            and "/" not in json.dumps(made)[1:40]
        )
        assert made["machine"][1:] == ["CPU, 1 thread", f"torch {torch.__version__}", "1 rank"]
    assert record_in(single)["label"] == 5 and record_in(single)["settings"]["seed"]["value"] == 7
    again(single, "--output", f"{tmp_path}/y/")
    assert same(single, *(tmp_path / "y").iterdir())


def test_flags_override_a_picture(here, demo, again, tmp_path):
    first = tmp_path / "first.png"
    common = *demo, "--num-sampling-steps", 3
    succeeds(here("sample.py", *common, "--labels", 1, 5, "--seed", 4, "--output", first))
    for flags in (("--labels", 2), ("--seeds", 9), ("--cfg-scale", 1), ("--sampler", "ddim")):
        given = dict(zip(("--labels", "--seed"), ((1, 5), (4,))))
        given = {**given, flags[0].replace("seeds", "seed"): flags[1:]}
        words = [word for name, values in given.items() for word in (name, *values)]
        succeeds(here("sample.py", *common, *words, "--output", tmp_path / "want.png"))
        name = "again-seed-9.png" if flags[0] == "--seeds" else "again.png"
        again(first, *flags)
        assert same(tmp_path / "want.png", tmp_path / name) and not same(first, tmp_path / name)
    assert again(first, "--output-type", "latent", "--output", tmp_path / "z.npy")
    assert np.load(tmp_path / "z.npy").shape == (2, 4, 16, 16)


@pytest.fixture(params=("DiT", "SiT", "Large-DiT", "LightningDiT", "JiT", "RAE"))
def family(request, tmp_path, tiny_vae):
    """Flags that make a picture of a family, and those of its files."""
    if request.param in ("SiT", "Large-DiT"):  # they ship with the code
        return [
            "--model",
            {"SiT": "SiT-Demo/2", "Large-DiT": "Large-DiT-Demo/2"}[request.param],
        ], []
    if request.param == "JiT":
        files = "--ckpt", tmp_path / "jit.pth", "--guide", write_jit(tmp_path)()
    elif request.param == "RAE":
        config = write_rae(tmp_path)()
        files = (
            "--ckpt",
            tmp_path / "rae.pt",
            "--guide",
            tmp_path / "g.pt",
            "--vae",
            tmp_path / "vit",
        )
        return ["--config", config], files
    elif request.param == "LightningDiT":
        model = build_lightning(patch_size=2, in_channels=4)
        config = SD | dict(sample=dict(sampling_method="euler", cfg_scale=1.5))
        torch.save(dict(ema=as_file(model), config=config), tmp_path / "x.pt")
        files = "--ckpt", tmp_path / "x.pt", "--vae", tiny_vae
    else:
        model = fill(DiT_models["DiT-S/2"](input_size=8, num_classes=8, depth=1))
        torch.save({"ema": model.state_dict()}, tmp_path / "x.pt")
        files = "--ckpt", tmp_path / "x.pt", "--vae", tiny_vae, "--num-heads", 6
        return files, files[:4]
    return files, files


def test_every_family(family, here, again, tmp_path):
    flags, files = family
    words = "--labels", 1, 0, "--num-sampling-steps", 3, "--output", tmp_path / "first.png"
    succeeds(here("sample.py", *flags, *CPU, *words))
    assert same(tmp_path / "first.png", again(tmp_path / "first.png", files=(*files, *CPU)))


def test_a_picture_of_two_ranks(demo, tmp_path, again, here):
    """Two ranks make the same pixels; one rank prints a notice about the other number."""
    first = tmp_path / "first.png"
    make = *demo, "--labels", 1, 5, 3, "--num-sampling-steps", 2, "--output", first
    repeat = *demo[2:], "--like", first, "--output", tmp_path / "again.png"
    run(2, *make)
    text = run(2, *repeat)
    assert same(first, tmp_path / "again.png") and "pixels" not in text
    done = succeeds(here("sample.py", *repeat))
    assert "first.png: was made by version" in done and "2 ranks; pixels can differ" in done


def test_refused_pictures(here, demo, tmp_path, monkeypatch):
    """Each is refused in one line, before anything is loaded."""
    monkeypatch.chdir(tmp_path)
    succeeds(here("sample.py", *demo, "--labels", 1, "--num-sampling-steps", 2))
    made = record_in("sample.png")
    image = Image.open("sample.png")

    def line(text=None, *flags):
        info = PngImagePlugin.PngInfo()
        if text is not None:
            info.add_text(TEXT_KEY, text if isinstance(text, str) else json.dumps(text), zip=True)
        image.save("x.png", pnginfo=info)
        return refused(here("sample.py", "--like", "x.png", *flags))

    def setting(name, value):
        return made | {"settings": made["settings"] | {name: {"value": value, "origin": "default"}}}

    files = demo[2:]
    assert "was made with --ckpt demo.safetensors; give that file" in line(made, "--vae", demo[5])
    assert "was made with --vae vae" in line(made, "--ckpt", demo[3])
    no_settings = "--like x.png: contains no settings of this version of sample.py"
    for text in (
        None,
        "",
        "[" * 10**5,
        "{}",
        "[]",
        "5",
        "x" * 2**17,
        2**22 * " ",
        made | {"grid": "x"},
    ):
        assert no_settings in line(text, *files)
    for name in ("ckpt", "class_names", "output", "config", "of_later_versions"):
        assert f"unknown setting {name}" in line(setting(name, "/etc/passwd"), *files)
    assert "--cfg-scale -1.0: must be from 0" in line(setting("cfg_scale", -1.0), *files)
    assert "--sampler rk: choose from" in line(setting("sampler", "rk"), *files)
    assert "--labels many: must be several" in line(setting("labels", "many"), *files)
    assert "--grids 1000001: must be" in line(made | {"grid": 10**6}, *files)
    assert "no picture 1" in line(made | {"picture": 1}, *files)
    made["files"]["ckpt"]["digest"] = "0" * 16
    assert "was made with another --ckpt (digest 0000000000000000, not " in line(made, *files)
    assert "x.png: conflicts with" not in line(made, *files)
    assert "--config: conflicts with --like x.png" in line(made, "--config", "no.yaml")
    assert "No such file" in refused(here("sample.py", "--like", "no.png"))
    before = (tmp_path / "sample.png").read_bytes()
    text = refused(here("sample.py", "--like", "sample.png", *files))
    assert "--like sample.png: would be replaced by its repetition; give an --output" in text
    assert (tmp_path / "sample.png").read_bytes() == before


def test_a_decoder_that_changes_after_it_was_opened(demo, tmp_path, capsys):
    """The picture's settings lack its digest, and a notice says so."""
    folder = shutil.copytree(demo[5], tmp_path / "vae")
    given = Options(model="DiT-Demo/2", ckpt=demo[3], vae=folder, device="cpu")
    run = open_run(Request.open(given))
    os.utime(next(folder.glob("*.safetensors")), (0, 0))
    assert {*digests_of(run)} == {"ckpt"}
    notice = capsys.readouterr().out
    assert "lack the digest of a file" in notice and f"{folder}: was changed" in notice
