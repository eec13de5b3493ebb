"""The one place where values are chosen: a user's, those of files, a model and its family, in this
order. The refusals of commands: tests/test_sample.py, tests/test_commands.py, tests/test_doors.py.
"""

import argparse
import inspect
from dataclasses import MISSING, fields, replace

import pytest
from conftest import mistake
from networks import run_of, run_with

import sample
import sample_ddp
from accel import Sampler
from accel.config.options import (
    DEFAULT,
    DEFAULTS,
    FAMILY,
    FID,
    JOB,
    MODEL,
    OPTIONS,
    USER,
    Options,
    Settings,
)
from accel.config.rules import Request
from accel.errors import InputRef
from accel.families import DEMO
from accel.families.configuration import Configuration
from accel.io.output import outputs_of
from accel.run.opening import files_of

# Python calls have no files, one seed, and print nothing.
OF_COMMANDS = {"seed_list", "grids", "output", "quiet", "json", "like"}


def test_commands_options_and_sampler_have_the_fields_of_settings():
    """Types, bounds and choices are those of the fields."""
    table = {field.name: field for field in fields(Settings) if field.name != "origins"}
    assert [*table] == [*OPTIONS]
    for parser, ranks in ((sample.make_parser(), False), (sample_ddp.make_parser(), True)):
        flags = {action.dest: action for action in parser._actions}
        names = {name for name, option in OPTIONS.items() if ranks or option.jobs != (FID,)}
        names -= {name for name in names if OPTIONS[name].ranks_only and not ranks}
        assert {*flags} - {"help", "version", "gpus"} == names
        for name in names:
            flag = flags[name]
            assert flag.default is None and flag.help.startswith(OPTIONS[name].help)
            assert (flag.choices or ()) == OPTIONS[name].choices
            if not isinstance(flag, argparse._StoreAction):
                assert OPTIONS[name].type is bool
            elif name != "labels":
                assert flag.type is OPTIONS[name].type
    parameters = inspect.signature(Sampler).parameters
    python = {name for name, option in OPTIONS.items() if option.jobs != (FID,)}
    python -= {name for name in python if OPTIONS[name].ranks_only} | OF_COMMANDS
    assert {*parameters} - {"check"} == python
    assert all(parameters[name].default is None for name in python)
    for name, field in table.items():
        value = field.default
        if value not in (MISSING, None, ()):
            assert Options(**{name: value})[name] == value


def test_a_misspelt_setting_is_an_error():
    with pytest.raises(KeyError, match="image_sise"):
        Options(image_sise=64)
    with pytest.raises(AttributeError, match="image_sise"):
        run_of().settings.image_sise  # noqa: B018


def test_what_a_model_implies_unless_a_flag_differs():
    xl = run_of().settings
    assert (xl.image_size, xl.num_classes, xl.vae, xl.ckpt) == (512, 1000, "ema", None)
    assert (xl.model, xl.sampler, xl.cfg_scale) == ("DiT-XL/2", "ddpm", 4.0)
    assert (xl.num_sampling_steps, xl.seed) == (250, 0)
    assert xl.labels == (207, 360, 387, 974, 88, 979, 417, 279)
    assert outputs_of({}) == ["sample.png"]
    # Its factor may be 4.
    Request.open(Options(model="DiT-S/2", vae="some/folder", image_size=24))

    run = run_of("DiT-Demo/2")
    demo = run.settings
    assert (demo.image_size, demo.num_classes) == (128, 8)
    assert demo.labels == tuple(range(8)) and demo.vae == str(DEMO / "vae")
    assert run.spec.defaults.ckpt == str(DEMO / "dit.safetensors")
    flags = dict(image_size=256, labels=(3,), vae="mse", output_type="latent")
    other = run_of("DiT-Demo/2", **flags).settings
    assert {name: getattr(other, name) for name in flags} == flags
    assert outputs_of(flags) == ["sample.npy"]
    for model in "SiT-XL/2", "Large-DiT-3B/2":
        assert run_of(model).settings.image_size == 256
    assert run_of(num_classes=12).settings.labels == tuple(range(8))
    assert xl.class_names[207] == "golden retriever" and demo.class_names[0] == "planet"
    for model in "DiT-S/8", "DiT-Demo/2":  # the demo's eight names are of eight classes
        assert run_of(model, num_classes=10).settings.class_names == ()


def recommending(checkpoint, **settings):
    """The checkpoint of a training run that recommends settings."""
    spec = checkpoint.spec
    return replace(checkpoint, spec=replace(spec, recommended={**spec.recommended, **settings}))


def test_of_several_origins_the_first_has_the_value(capsys):
    """A flag, a configuration file, the weights, their model, its family, an option's default."""
    checkpoint = replace(run_of("REPA-SiT-XL/2").checkpoint, given=InputRef("own.pt"))
    trained = recommending(
        checkpoint, cfg_scale=2.0, num_sampling_steps=40, guidance_interval=(0.0, 0.5)
    )
    values = dict(cfg_scale=3.0, num_sampling_steps=50)
    file = Configuration(values, family="REPA", given=InputRef("own.yaml", "config"))
    settings = run_with(trained, file, cfg_scale=5.0).settings
    assert capsys.readouterr().out.splitlines() == [
        "own.yaml: specifies num sampling steps 50; flags override it",
        "own.pt: specifies guidance interval 0 0.5; flags override it",
    ]
    for name, value, origin in (
        ("cfg_scale", 5.0, USER),
        ("num_sampling_steps", 50, "own.yaml"),
        ("guidance_interval", (0.0, 0.5), "own.pt"),
        ("guidance_channels", 4, MODEL),
        ("sampler", "sde", FAMILY),
        ("seed", DEFAULTS["seed"], DEFAULT),
        ("precision", "fp32", DEFAULT),
    ):
        assert (getattr(settings, name), settings.origins[name]) == (value, origin)
    for run, scale, origin in (
        (run_with(trained, file), 3.0, "own.yaml"),
        (run_with(trained), 2.0, "own.pt"),
        (run_with(checkpoint), 1.8, MODEL),
    ):
        assert (run.settings.cfg_scale, run.guidance.scale) == (scale, scale)
        assert run.settings.origins["cfg_scale"] == origin


@pytest.mark.parametrize("flags, size", [({}, 512), (dict(image_size=256), 256)])
def test_the_published_file_of_a_job(flags, size):
    assert files_of(Options(**flags)).given.name == f"DiT-XL-2-{size}x{size}.pt"
    of_job = files_of(Options(**flags, num_fid_samples=9))
    assert of_job.given.name == "DiT-XL-2-256x256.pt"
    of_job = files_of(Options(image_size=512, num_fid_samples=9))
    assert of_job.given.name == "DiT-XL-2-512x512.pt"


def test_a_job_comes_after_the_weights_and_before_their_model():
    """Upstream's FID program has 256 px and a scale of 1.5, here DiT's models 512 px and 4.0."""
    checkpoint = replace(run_of().checkpoint, given=InputRef("own.pt"))
    trained = replace(checkpoint, spec=replace(checkpoint.spec, latent_size=64))
    file = Configuration(dict(cfg_scale=3.0), family="DiT", given=InputRef("own.yaml", "config"))
    for flags, weights, configuration, size, scale in (
        ({}, checkpoint, None, (256, JOB), (1.5, JOB)),
        ({}, trained, None, (512, "own.pt"), (1.5, JOB)),
        (dict(image_size=512), checkpoint, None, (512, USER), (1.5, JOB)),
        (dict(cfg_scale=5.0), trained, file, (512, "own.pt"), (5.0, USER)),
        ({}, recommending(trained, cfg_scale=2.0), None, (512, "own.pt"), (2.0, "own.pt")),
        ({}, recommending(trained, cfg_scale=2.0), file, (512, "own.pt"), (3.0, "own.yaml")),
    ):
        settings = run_with(weights, configuration, num_fid_samples=9, **flags).settings
        assert (settings.image_size, settings.origins["image_size"]) == size
        assert (settings.cfg_scale, settings.origins["cfg_scale"]) == scale


@pytest.mark.parametrize(
    "values, settings",
    [
        (dict(labels=("class 3", "null"), seed=7), dict(labels=(3, 8), seed=7)),
        (dict(num_sampling_steps=9), dict(num_sampling_steps=9)),
        (dict(cfg_scale=1), dict(cfg_scale=1.0)),
    ],
)
def test_a_later_call_changes_only_its_arguments(values, settings, tmp_path):
    """The user's files may be gone by then."""
    names = tmp_path / "names.txt"
    names.write_text("\n".join(f"class {number}" for number in range(8)))
    options = dict(sampler="dpm++", guidance_interval=(0.1, 0.8), class_names=names)
    run = run_of("DiT-Demo/2", **options)
    fresh = run_of("DiT-Demo/2", **options, **values)
    names.unlink()
    changed = run.changed(**values)
    assert changed.settings == replace(run.settings, **settings)
    assert (changed.process, changed.guidance) == (fresh.process, fresh.guidance)


@pytest.mark.parametrize("label", ("golden retreiver", 1001))
def test_a_published_models_labels_are_checked_before_its_download(label):
    with mistake("labels", str(label)):
        Request.open(Options(model="DiT-XL/2", labels=(label,)))


@pytest.mark.parametrize(
    "values",
    [
        dict(seed=2**64),
        dict(num_sampling_steps=1000),
        dict(labels=("cat",)),
        dict(labels=("null",)),
        dict(cfg_scale=2.0),
    ],
)
def test_a_later_call_is_checked_as_the_first(values):
    run = run_of("DiT-Demo/2", sampler="dpm++", cfg_scale=1.0)
    checkpoint = replace(run.checkpoint, spec=replace(run.spec, null_class=False))
    run = run_with(checkpoint, sampler="dpm++", cfg_scale=1.0)
    for refused in (
        lambda: run.changed(**values),
        lambda: run_with(checkpoint, **{"sampler": "dpm++", "cfg_scale": 1.0, **values}),
    ):
        with mistake(*values):
            refused()
