"""The one place where values are chosen: what a user, files, a model and its family say, in this
order. What commands refuse: tests/test_sample.py, tests/test_commands.py, tests/test_doors.py.
"""

from dataclasses import replace

import pytest
import torch
from conftest import fill
from networks import run_of

from accel.config.options import DEFAULTS, USER, Options
from accel.config.rules import check, named_model
from accel.decoders import LatentSpace
from accel.errors import Given, UsageError
from accel.families import DEMO
from accel.families.configuration import Configuration
from accel.families.dit.network import DiT_models
from accel.io.output import outputs_of
from accel.run.opening import files_of, open_run
from accel.run.resolve import DEFAULT, FAMILY, JOB, MODEL, choose, resolve


def test_what_a_model_implies_unless_a_flag_says_otherwise():
    xl = run_of()
    assert (xl["image_size"], xl["num_classes"], xl["vae"], xl["ckpt"]) == (512, 1000, "ema", None)
    assert (xl["model"], xl["sampler"], xl["cfg_scale"]) == ("DiT-XL/2", "ddpm", 4.0)
    assert (xl["num_sampling_steps"], xl["seed"]) == (250, 0)
    assert xl["labels"] == (207, 360, 387, 974, 88, 979, 417, 279)
    assert outputs_of(xl.values) == ("sample.png",)
    # Its factor may be 4.
    check(Options(model="DiT-S/2", vae="some/folder", image_size=24))

    demo = run_of("DiT-Demo/2")
    assert (demo["image_size"], demo["num_classes"]) == (128, 8)
    assert demo["labels"] == tuple(range(8)) and demo["vae"] == str(DEMO / "vae")
    assert demo.spec.defaults.ckpt == str(DEMO / "dit.safetensors")
    flags = dict(image_size=256, labels=(3,), vae="mse", output_type="latent")
    other = run_of("DiT-Demo/2", **flags)
    assert {name: other[name] for name in flags} == flags
    assert outputs_of(other.values) == ("sample.npy",)
    for model in "SiT-XL/2", "Large-DiT-3B/2":
        assert run_of(model)["image_size"] == 256
    assert run_of(num_classes=12)["labels"] == tuple(range(8))
    assert xl["class_names"][207] == "golden retriever" and demo["class_names"][0] == "planet"
    for model in "DiT-S/8", "DiT-Demo/2":  # the demo's eight names are of eight classes
        assert run_of(model, num_classes=10)["class_names"] == ()


def test_of_several_origins_the_first_has_the_value(capsys):
    """A flag, a configuration file, the weights, their model, its family, an option's default."""
    source = replace(run_of("REPA-SiT-XL/2").source, given=Given("own.pt"))
    said = source.recommending(cfg_scale=2.0, num_sampling_steps=40, guidance_interval=(0.0, 0.5))
    values = dict(cfg_scale=3.0, num_sampling_steps=50)
    file = Configuration(values, given=Given("own.yaml", "config"))

    def run(flags, source, file):
        choice = choose(Options(**flags), source, None, file)
        return resolve(choice, torch.device("cpu"), LatentSpace())

    everything = run(dict(cfg_scale=5.0), said, file)
    for name, value, origin in (
        ("cfg_scale", 5.0, USER),
        ("num_sampling_steps", 50, "own.yaml"),
        ("guidance_interval", (0.0, 0.5), "own.pt"),
        ("guidance_channels", 4, MODEL),
        ("sampler", "sde", FAMILY),
        ("seed", DEFAULTS["seed"], DEFAULT),
        ("precision", "fp32", DEFAULT),
    ):
        assert (everything[name], everything.origins[name]) == (value, origin)
    everything.announce()
    assert capsys.readouterr().out.splitlines() == [
        "own.yaml: says num sampling steps 50; flags override it",
        "own.pt: says guidance interval 0 0.5; flags override it",
    ]
    for each, scale, origin in (
        (run({}, said, file), 3.0, "own.yaml"),
        (run({}, said, None), 2.0, "own.pt"),
        (run({}, source, None), 1.8, MODEL),
    ):
        assert (each["cfg_scale"], each.guidance.scale) == (scale, scale)
        assert each.origins["cfg_scale"] == origin


@pytest.mark.parametrize("flags, size", [({}, 512), (dict(image_size=256), 256)])
def test_the_published_file_of_a_job(flags, size):
    assert files_of(Options(**flags)).given.name == f"DiT-XL-2-{size}x{size}.pt"
    of_job = files_of(Options(**flags, num_fid_samples=9))
    assert of_job.given.name == "DiT-XL-2-256x256.pt"
    of_job = files_of(Options(image_size=512, num_fid_samples=9))
    assert of_job.given.name == "DiT-XL-2-512x512.pt"


def test_a_job_comes_after_the_weights_and_before_their_model():
    """Upstream's FID program has 256 px and a scale of 1.5, here DiT's models 512 px and 4.0."""
    source = replace(run_of().source, given=Given("own.pt"))
    trained = replace(source, spec=replace(source.spec, latent_size=64))
    file = Configuration(dict(cfg_scale=3.0), given=Given("own.yaml", "config"))
    for flags, weights, configuration, sizes, scales in (
        ({}, source, None, (256, JOB), (1.5, JOB)),
        ({}, trained, None, (512, "own.pt"), (1.5, JOB)),
        (dict(image_size=512), source, None, (512, USER), (1.5, JOB)),
        (dict(cfg_scale=5.0), trained, file, (512, "own.pt"), (5.0, USER)),
        ({}, trained.recommending(cfg_scale=2.0), None, (512, "own.pt"), (2.0, "own.pt")),
        ({}, trained.recommending(cfg_scale=2.0), file, (512, "own.pt"), (3.0, "own.yaml")),
    ):
        options = Options(num_fid_samples=9, **flags)
        choice = choose(options, weights, None, configuration)
        run = resolve(choice, torch.device("cpu"), LatentSpace())
        assert (run["image_size"], run.origins["image_size"]) == sizes
        assert (run["cfg_scale"], run.origins["cfg_scale"]) == scales


def test_weights_come_before_their_model_and_options_before_both(tmp_path):
    state = fill(DiT_models["DiT-S/4"](input_size=8, num_classes=10)).state_dict()
    facts = dict(family="DiT", guidance_channels=4, num_classes=10, vae="mse")
    torch.save({"ema": state, "metadata": facts}, tmp_path / "x.pt")
    options = Options(ckpt=tmp_path / "x.pt", output_type="latent", device="cpu")
    check(options)  # names of labels, too, wait for the weights
    assert named_model(options) is None and "vae" not in options
    run = open_run(options)
    assert (run["model"], run["image_size"], run["num_classes"]) == ("DiT-S/4", 64, 10)
    assert (run["guidance_channels"], run["vae"], run["cfg_scale"]) == (4, "mse", 4.0)
    assert run["labels"] == tuple(range(8))
    again = run.resolved(options.changed(guidance_channels=3, image_size=128, seed=7))
    assert (again["guidance_channels"], again["image_size"]) == (3, 128)
    assert (again.latent_size, again["seed"]) == (16, 7)
    assert again.source is run.source
    for wrong, words in (
        (dict(seed=2**64), "seed=18446744073709551616: must be from -9223372036854775808 to"),
        (dict(guidance_interval=(1, 0)), "guidance_interval=1 0: must be two numbers"),
        (dict(precision="fp32", vae_precision="fp16"), "vae_precision=fp16: cpu has no float16"),
    ):
        with pytest.raises(UsageError, match=words):
            run.resolved(options.changed(**wrong))
