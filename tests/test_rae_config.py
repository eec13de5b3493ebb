"""RAE's configuration files as options."""

import copy
import json

import pytest
import yaml
from conftest import mistake

from accel.config.options import Options
from accel.config.rules import Request
from accel.errors import UsageError

TEXT = """
stage_1:
  target: stage1.RAE
  params:
    encoder_cls: 'Dinov2withNorm'
    encoder_params: {'normalize': True}
    decoder_config_path: 'configs/decoder/ViTXL'
    pretrained_decoder_path: 'models/decoders/a/model.pt'
    noise_tau: 0.8
    normalization_stat_path: 'models/stats/a/stat.pt'
stage_2:
  target: stage2.models.DDT.DiTwDDTHead
  params:
    input_size: 16
    patch_size: 1
    in_channels: 768
    hidden_size: [1152, 2048]
    depth: [28, 2]
    num_heads: [16, 16]
    num_classes: 1000
    use_qknorm: False
    wo_shift: False
  ckpt: 'models/XL/stage2_model.pt'
transport:
  params: {path_type: 'Linear', prediction: 'velocity', loss_weight: null}
sampler:
  mode: ODE
  params: {sampling_method: 'euler', num_steps: 50, atol: 1e-6, rtol: 1e-3, reverse: False}
guidance:
  method: 'autoguidance'
  scale: 1.42
  t-min: 0.1
  t-max: 9e-1
  guidance_model:
    target: stage2.models.DDT.DiTwDDTHead
    params: {hidden_size: [384, 2048], depth: [12, 2], num_heads: [6, 16]}
    ckpt: 'models/S/stage2_model.pt'
misc:
  latent_size: [768, 16, 16]
  num_classes: 1000
  time_dist_shift_dim: 196608
  time_dist_shift_base: 4096
training: {epochs: 1400}
"""
CONTENT = yaml.safe_load(TEXT)
NAMES = {"ckpt": "XL/stage2_model.pt", "guide": "S/stage2_model.pt"}
NAMES |= {"vae": "decoders/a/model.pt", "latent_stats": "stats/a/stat.pt"}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Work in a folder with the files."""
    for path in NAMES.values():
        (tmp_path / "models" / path).parent.mkdir(parents=True)
        (tmp_path / "models" / path).touch()
    monkeypatch.chdir(tmp_path)


def written(content, name="run.yaml"):
    with open(name, "w") as file:
        file.write(content if isinstance(content, str) else yaml.safe_dump(content))
    return name


def changed(content=CONTENT, **entries):
    """The configuration with other entries, by dotted names with two underscores for dots."""
    content = copy.deepcopy(content)
    for name, value in entries.items():
        *sections, last = name.split("__")
        section = content
        for part in sections:
            section = section.setdefault(part, {})
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    return content


def taken(name, **given):
    """Return the options that a configuration file adds to those that are given."""
    options = Options(config=name, **given)
    values = Request.open(options).values
    return {name: value for name, value in values.items() if name not in options}


def refused(name, **given):
    """Return the error about a configuration file."""
    with pytest.raises(UsageError) as error:
        taken(name, **given)
    assert error.value.parameter == "config" and "\n" not in str(error.value)
    return error.value


def test_the_options_of_a_file(caplog):
    options = taken(written(TEXT))
    assert options.pop("timestep_shift") == pytest.approx((4096 / (768 * 16 * 16)) ** 0.5)
    assert options == dict(
        **{name: f"models/{path}" for name, path in NAMES.items()},
        image_size=256,
        num_classes=1000,
        guidance_channels=768,
        guidance_interval=(0.1, 0.9),
        cfg_scale=1.42,
        sampler="euler",
        num_sampling_steps=49,  # 50 points
    )
    assert not caplog.records  # all its entries are known


def test_other_entries_are_listed_in_a_line(caplog):
    content = changed(transport__params__sigma=1, misc__foo="bar", training__lr=2)
    assert taken(written(content)) == taken(written(TEXT))
    [record] = caplog.records
    assert record.getMessage() == (
        "run.yaml: arguments not interpreted: transport.params.sigma=1, misc.foo=bar"
    )


def test_a_model_of_another_family_is_refused():
    with mistake("model", "config=run.yaml is of a RAE"):
        taken(written(TEXT), model="DiT-XL/2")


def test_options_that_a_file_leaves_out():
    """The rules are those of its sample_ddp.py: the shift depends on the size of the latents, and a
    scale of at most one is no guidance, so the second network is not needed.
    """
    content = changed(
        guidance__t_min=0.3,
        misc__latent_size=[768, 32, 32],
        misc__time_dist_shift_dim=None,
        sampler__params__num_steps=None,
        stage_1__params__decoder_patch_size=8,
    )
    options = taken(written(content))
    assert options["guidance_interval"] == (0.3, 0.9)
    assert options["timestep_shift"] == pytest.approx(1 / 13.856406)
    assert (options["image_size"], options["num_sampling_steps"]) == (256, 49)
    for scale in (1.0, 0.5):
        options = taken(written(changed(guidance__scale=scale)))
        assert options["cfg_scale"] == 1 and "guide" not in options
        assert taken("run.yaml", cfg_scale=2.0)["guide"] == f"models/{NAMES['guide']}"
    options = taken(written(changed(guidance=None)))
    assert options["cfg_scale"] == 1 and options["guidance_interval"] == (0, 1)


def test_files_are_here_or_beside_the_configuration(tmp_path, monkeypatch):
    """Missing files are named in one line, with the command that fetches them."""
    tmp_path = tmp_path / "empty"
    tmp_path.mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside" / "models" / "XL").mkdir(parents=True)
    name = written(changed(guidance=None), "beside/run.yaml")
    error = refused(name)
    assert "models/stats/a/stat.pt" in error.problem and error.remedy == (
        "hf download nyu-visionx/RAE-collections XL/stage2_model.pt decoders/a/model.pt "
        "stats/a/stat.pt --local-dir models"
    )
    (tmp_path / "beside" / "models" / "XL" / "stage2_model.pt").touch()
    latents = taken(name, output_type="latent")  # they need no decoder
    assert latents["ckpt"] == "beside/models/XL/stage2_model.pt"
    (tmp_path / "models" / "XL").mkdir(parents=True)
    (tmp_path / "models" / "XL" / "stage2_model.pt").touch()
    job = taken(name, num_fid_samples=4, vae="ema", latent_stats="other.pt")
    assert job["ckpt"] == "models/XL/stage2_model.pt"
    assert "models/decoders/a/model.pt" in refused(name, num_fid_samples=4).problem


def test_a_decoders_own_configuration_is_not_ignored(tmp_path):
    """Facts that are in no tensor are those of the file beside the decoder, else of the published
    decoder. The configuration names a file of its own, which must agree.
    """
    folder = tmp_path / "configs" / "decoder" / "ViTXL"
    folder.mkdir(parents=True)
    beside = tmp_path / "models/decoders/a/config.json"
    content = dict(decoder_hidden_size=1152, decoder_num_attention_heads=16, layer_norm_eps=1e-12)
    name = written(TEXT)
    for entry, value in (
        ("decoder_num_attention_heads", 18),
        ("layer_norm_eps", 1e-6),
        ("hidden_act", "relu"),
        ("hidden_act", "gelu_new"),
        ("qkv_bias", False),
        ("num_channels", 1),
    ):
        (folder / "config.json").write_text(json.dumps(content))
        taken(name)
        other = json.dumps({**content, entry: value})
        (folder / "config.json").write_text(other)
        assert entry in refused(name).problem
        beside.write_text(other)  # the remedy
        taken(name)
        beside.unlink()
    assert taken(name, vae="other")
    (folder / "config.json").write_text("[1]")
    assert "ViTXL" in refused(name).problem


def test_a_decoders_configuration_may_be_named_itself(tmp_path):
    (tmp_path / "relu.json").write_text(json.dumps(dict(hidden_act="relu")))
    (tmp_path / "models/decoders/a/config.json").write_text("{}")
    name = written(changed(stage_1__params__decoder_config_path="relu.json"))
    assert "hidden_act" in refused(name).problem


def test_the_encoders_statistics_of_pixels_are_not_ignored(tmp_path):
    """The original takes them from encoder_config_path, whatever the encoder's class is."""
    key = "stage_1__params__encoder_config_path"
    folder = tmp_path / "encoder"
    folder.mkdir()
    half = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    (folder / "preprocessor_config.json").write_text(json.dumps(half))
    name = written(changed(**{key: "encoder"}))
    assert "image_mean" in refused(name).problem
    beside = tmp_path / "models/decoders/a/preprocessor_config.json"
    beside.write_text(json.dumps(half))
    taken(name)
    taken(written(changed(**{key: "google/siglip2-base-patch16-256"})))
    beside.unlink()
    taken(written(changed(**{key: "facebook/vit-mae-base"})))


def test_flags_override_a_file():
    name = written(changed(guidance__method="cfg", sampler__params__sampling_method=None))
    given = dict(ckpt="other.pt", vae="ema", cfg_scale=2.0, sampler="heun", timestep_shift=0.5)
    options = Options(config=name, **given)
    values = Request.open(options).values
    assert {**values, **given} == values
    assert (values["num_sampling_steps"], values["guidance_interval"]) == (49, (0.1, 0.9))


@pytest.mark.parametrize(
    "entries, name",
    [
        (dict(sampler__params__sampling_method=None), "sampling_method"),
        (dict(sampler=None), "sampling_method"),
        (dict(sampler__params__sampling_method="heun2"), "sampling_method"),
        (dict(sampler__mode="SDE"), "sampler.mode"),
        (dict(sampler__params__reverse=True), "sampler.params.reverse"),
        (dict(sampler__params__num_steps=1), "num_steps"),
        (dict(transport__params__path_type="GVP"), "path_type"),
        (dict(transport__params__prediction="noise"), "prediction"),
        (dict(stage_2__params__wo_shift=True), "stage_2.params.wo_shift"),
        (dict(stage_2__params__use_rope=False), "stage_2.params.use_rope"),
        (dict(stage_2__params__patch_size=[2, 1]), "patch_size"),
        (dict(stage_2__target="stage2.models.lightningDiT.LightningDiT"), "stage_2.target"),
        (dict(stage_2__ckpt=None), "stage_2.ckpt"),
        (dict(stage_2=None), "stage_2"),
        (dict(stage_1__ckpt="rae.pt"), "stage_1.ckpt"),
        (
            dict(stage_1__params__encoder_config_path="google/siglip2-base-patch16-256"),
            "google/siglip2-base-patch16-256",
        ),
        (dict(stage_1__params__decoder_config_path=None), "vit_mae-base"),
        (dict(stage_1__params__normalization_stat_path=None), "normalization_stat_path"),
        (dict(stage_1__params__reshape_to_2d=False), "reshape_to_2d"),
        (dict(stage_1__params__eps=0.1), "stage_1.params.eps"),
        (dict(guidance__method="interval"), "guidance.method"),
        (dict(guidance__guidance_model=None), "guidance_model"),
        (dict(guidance__guidance_model__params__wo_shift=True), "wo_shift"),
        (dict(guidance__scale="1.42"), "guidance.scale"),
        (dict(guidance__t_min=0.9), "t_min"),
        (dict(guidance__method="cfg", misc__null_label=0), "null_label"),
        (dict(misc__latent_size=[768, 16, 8]), "latent_size"),
        (dict(misc__time_dist_shift_dim=1024), "time_dist_shift_dim"),
        (dict(stage_2__ckpt="${oc.env:HOME}/x.pt"), "${oc.env:HOME}/x.pt"),
        (dict(guidance=[1]), "guidance"),
    ],
)
def test_an_unsupported_value_is_refused(entries, name):
    assert name in refused(written(changed(**entries))).problem


@pytest.mark.parametrize("text", ["a: [", "a: 1", "- 1", "", "\0"])
def test_other_files_are_refused(text):
    refused(written(text))
    refused("none.yaml")
