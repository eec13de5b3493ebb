"""LightningDiT's files: checkpoint, YAML beside it, VA-VAE and statistics, by command,
hub and FID job.
"""

import numpy as np
import pytest
import torch
from conftest import fill, mistake
from forks import refused, succeeds
from hub import Hub
from networks import error, identify, opened
from PIL import Image
from test_lightning_dit import as_file, build

from accel.checkpoints import checkpoint_of
from accel.checkpoints.module import StateTensors
from accel.config.options import OPTIONS, Options
from accel.decoders.autoencoder_kl.half import HalfDecoder
from accel.decoders.ldm import STATISTICS_FILE
from accel.decoders.loading import digest, find, load
from accel.errors import InputRef
from accel.families import Defaults
from accel.families.lightning_dit.network import LightningDiT_models
from accel.io.output import to_grid
from accel.runtime.network import EagerNetwork
from accel.sampling import denoise
from accel.sampling.flow import Euler
from accel.sampling.guidance import Guidance
from accel.tensors.shapes import shapes_only

YAML = """data: {image_size: 64, num_classes: 8, latent_norm: true, latent_multiplier: 1.0}
model: {model_type: LightningDiT-XL/1, use_qknorm: false}
transport: {path_type: Linear, prediction: velocity}
sample: {mode: ODE, sampling_method: euler, num_sampling_steps: 5, cfg_scale: 2.5, cfg_interval_start: 0.11,
         timestep_shift: 0.3}
"""


def vae_files(folder, levels=5, channels=32):
    """VA-VAE's files in small: (AutoencoderKL with the weights, statistics of its latents)."""
    from diffusers import AutoencoderKL

    kinds = dict(down_block_types=["DownEncoderBlock2D"] * levels)
    kinds["up_block_types"] = ["AttnUpDecoderBlock2D"] + ["UpDecoderBlock2D"] * (levels - 1)
    vae = fill(
        AutoencoderKL(
            block_out_channels=[32] * levels, layers_per_block=2, latent_channels=channels, **kinds
        )
    )
    for value in vae.parameters():
        value.data = (
            value.data / value[0].numel() ** 0.5
            if value.ndim == 4
            else value.data + (value.ndim == 1)
        )
    names = {
        "mid_block.resnets.0": "mid.block_1",
        "mid_block.attentions.0": "mid.attn_1",
        "conv_norm_out": "norm_out",
        "mid_block.resnets.1": "mid.block_2",
        "group_norm": "norm",
        "to_out.0": "proj_out",
        ".to_": ".",
    }
    for level in range(levels):
        theirs = f"up_blocks.{level}"
        ldm = f"up.{levels - 1 - level}"
        names |= {f"{theirs}.upsamplers.0": f"{ldm}.upsample", f"{theirs}.resnets": f"{ldm}.block"}
        names |= {f"{theirs}.attentions": f"{ldm}.attn"}
    state = {"loss.logvar": torch.zeros(()), "foundation_model.steps": torch.tensor(1)}
    for name, value in vae.state_dict().items():
        for theirs, ldm in names.items():
            name = name.replace(theirs, ldm)
        state[name] = value[..., None, None] if "attn" in name and value.ndim == 2 else value
    torch.save({"state_dict": state, "epoch": 1}, folder / "vavae.pt")
    stats = dict(mean=torch.randn(1, channels, 1, 1), std=torch.rand(1, channels, 1, 1) + 0.5)
    torch.save(stats, folder / STATISTICS_FILE)
    return vae, stats


def checkpoint(folder, **form):
    """A training run's checkpoint of a random network, in which names begin with a
    wrapper's prefix.
    """
    model = build(**form)
    wrapped = {f"module.{name}": value for name, value in as_file(model).items()}
    torch.save({"model": wrapped, "ema": wrapped, "opt": {"state": {}}}, folder / "small.pt")
    return model


def test_va_vae_is_an_autoencoder_kl(tmp_path):
    torch.manual_seed(0)  # the accuracy of float32 depends on the draw
    vae, stats = vae_files(tmp_path)
    space = find(str(tmp_path / "vavae.pt"))
    latents = torch.randn(1, 32, 2, 2)
    assert (space.channels, space.factor, space.scale) == (32, 16, 1.0)
    with torch.inference_mode():
        want = vae.decode(latents * stats["std"] + stats["mean"]).sample
        got = load(space, "cpu")(space.to_decoder(latents))
        assert torch.equal(got, want) and want.std() > 0.1
        rewritten = HalfDecoder(load(space, "cpu"), torch.float32)(space.to_decoder(latents))
        assert error(rewritten, want.double()) < 1e-5
    (tmp_path / STATISTICS_FILE).rename(tmp_path / "other.pt")
    given = find(str(tmp_path / "vavae.pt"), str(tmp_path / "other.pt"))
    assert given[:-1] == space[:-1]
    torch.save({name: value.flatten() for name, value in stats.items()}, tmp_path / "other.pt")
    assert find(str(tmp_path / "vavae.pt"), str(tmp_path / "other.pt"))[:-1] == space[:-1]
    with mistake("vae", "vavae.pt"):
        find(str(tmp_path / "vavae.pt"))
    for wrong in (
        dict(mean=stats["mean"]),
        stats | dict(std=stats["std"] * 0),
        stats | dict(mean=torch.zeros(1, 4, 1, 1)),
        stats | dict(mean=torch.zeros(())),
    ):
        torch.save(wrong, tmp_path / "wrong.pt")
        with mistake("latent_stats", "wrong.pt"):
            find(str(tmp_path / "vavae.pt"), str(tmp_path / "wrong.pt"))
    state = torch.load(tmp_path / "vavae.pt")["state_dict"]
    torch.save({"model": state}, tmp_path / "kl16.ckpt")  # as MAR's
    other = find(str(tmp_path / "kl16.ckpt"), str(tmp_path / "other.pt"))
    assert other[:-1] == given[:-1] and digest(other) == digest(given)


def test_the_command_believes_the_files(tmp_path, here):
    """Checkpoint, YAML, VA-VAE and statistics; flags override what the YAML says."""
    model = checkpoint(tmp_path)
    (vae, stats) = vae_files(tmp_path)
    (tmp_path / "run.yaml").write_text(YAML)
    flags = "--device", "cpu", "--ckpt", tmp_path / "small.pt", "--labels", 1, 5, "--seed", 3
    files = "--vae", tmp_path / "vavae.pt"
    for more, number, shift, others in (
        ((), 4, 0.3, ", timestep shift 0.3, cfg scale 2.5, num sampling steps 4"),
        (("--timestep-shift", 1, "--num-sampling-steps", 3), 3, 1.0, ", cfg scale 2.5"),
    ):
        text = succeeds(
            here(
                "sample.py",
                *flags,
                *more,
                "--output",
                tmp_path / "x.npy",
                "--output-type",
                "latent",
            )
        )
        assert f"run.yaml: specifies guidance interval 0 0.89{others}; flags override it" in text
        torch.manual_seed(3)
        z = torch.randn(2, 32, 4, 4)
        guidance = Guidance(2.5, 8, 3, (0.0, 0.89))
        want = denoise(
            EagerNetwork(model), Euler(number, shift), guidance, z, torch.tensor([1, 5]), None
        )
        assert np.array_equal(np.load(tmp_path / "x.npy"), want.numpy())
    assert "64 px" in succeeds(
        here("sample.py", *flags, *files, *more, "--output", tmp_path / "x.png")
    )
    with torch.inference_mode():
        pixels = torch.cat(
            [vae.decode(one * stats["std"] + stats["mean"]).sample for one in want.split(1)]
        )
    assert np.array_equal(np.asarray(Image.open(tmp_path / "x.png")), to_grid(pixels).numpy())
    assert "euler, heun" in refused(
        here("sample.py", *flags, "--sampler", "sde", "--output", tmp_path / "y.png")
    )


def test_a_converted_file_keeps_its_recipe(tmp_path, here):
    """The YAML stays behind: the new file holds its values."""
    checkpoint(tmp_path)
    (tmp_path / "small.yaml").write_text(YAML)
    (tmp_path / "away").mkdir()
    before = implied(tmp_path / "small.pt")
    for name, source in (
        ("b.safetensors", tmp_path / "small.pt"),
        ("c.pt", tmp_path / "away" / "b.safetensors"),
    ):
        succeeds(
            here(
                "scripts/convert_checkpoint.py",
                "--ckpt",
                source,
                "--output",
                tmp_path / "away" / name,
            )
        )
        assert implied(tmp_path / "away" / name) == before


def implied(ckpt):
    """Return the values of options that weights imply."""
    run = opened(Options(ckpt=ckpt, device="cpu", output_type="latent"))
    names = {*Defaults._fields} & {*OPTIONS} - {"ckpt", "vae", "class_names"}
    return {name: getattr(run.settings, name) for name in names}


WRONG = (
    "model: {}\nsample: {cfg_scale: !!python/object/apply:os.system [ls]}",
    YAML.replace("2.5", ".nan"),
    YAML.replace("velocity", "noise"),
    YAML.replace("latent_multiplier: 1.0", "latent_multiplier: .nan"),
)


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_a_wrong_yaml_is_one_line(text, tmp_path):
    checkpoint(tmp_path)
    (tmp_path / "small.yaml").write_text(text)
    with mistake("ckpt", "small.pt"):
        identify(tmp_path / "small.pt")


def test_what_implies_how_to_sample(tmp_path, capsys):
    """A published name, the checkpoint's own entry or a YAML file of this name; another program's
    YAML file is printed, and of several none is read.
    """
    checkpoint(tmp_path)
    path = tmp_path / "lightningdit-xl-imagenet256-64ep.pt"
    (tmp_path / "small.pt").rename(path)
    assert identify(path).recommended["cfg_scale"] == 10.0
    content = torch.load(path)
    own = dict(sample=dict(num_sampling_steps=250, cfg_scale=9))
    torch.save(content | dict(config=own), tmp_path / "own.pt")
    want = dict(
        guidance_interval=(0.0, 1.0), timestep_shift=1.0, cfg_scale=9, num_sampling_steps=249
    )
    assert identify(tmp_path / "own.pt").recommended == want
    (tmp_path / "compose.yaml").write_text("services: {web: x}")
    assert identify(path).recommended["cfg_scale"] == 10.0
    line = f"{path}: compose.yaml: arguments not interpreted: services.web=x\n"
    assert line in capsys.readouterr().out
    (tmp_path / "a.yaml").write_text(YAML)
    torch.save(content, tmp_path / "x.pt")
    spec = identify(tmp_path / "x.pt")
    assert (spec.recommended, spec.specified_in) == ({}, "")
    torch.save(content, tmp_path / "a.pt")
    spec = identify(tmp_path / "a.pt")
    assert (spec.recommended["cfg_scale"], spec.specified_in) == (2.5, "a.yaml")


def test_a_yaml_file_of_another_model_is_refused(tmp_path):
    with shapes_only():
        state = as_file(LightningDiT_models["LightningDiT-B/1"]())
    (tmp_path / "run.yaml").write_text("model: {model_type: LightningDiT-XL/1}")
    with mistake("ckpt", "run.yaml", "LightningDiT-XL/1", "LightningDiT-B/1"):
        checkpoint_of(InputRef("x.pt"), StateTensors(state), {}, path=tmp_path / "x.pt")


SD = dict(model={}, data=dict(latent_norm=False, latent_multiplier=0.18215))


@pytest.mark.parametrize("method", ["euler", "dopri5"])
def test_a_configuration_inside_a_file_of_sds_latents(method, tmp_path, tiny_vae, here):
    """Its multiplier is the decoder's scale. Another solver is refused, unless the user names
    one; a converted file says the same.
    """
    torch.manual_seed(0)
    model = build(patch_size=2, in_channels=4)
    config = SD | dict(sample=dict(sampling_method=method, num_sampling_steps=3, cfg_scale=1.5))
    torch.save(dict(ema=as_file(model), config=config), tmp_path / "x.pt")
    succeeds(
        here(
            "scripts/convert_checkpoint.py",
            "--ckpt",
            tmp_path / "x.pt",
            "--output",
            tmp_path / "y.pt",
        )
    )
    pictures = []
    for name in "x", "y":
        command = ["sample.py", "--ckpt", tmp_path / f"{name}.pt", "--vae", tiny_vae, "--labels", 1]
        command += ["--device", "cpu", "--output", tmp_path / f"{name}.png"]
        if method == "dopri5":
            words = "--sampler dopri5: is not for a LightningDiT"
            assert words in refused(here(*command))
            command += ["--sampler", "euler"]
        succeeds(here(*command))
        pictures.append(np.asarray(Image.open(tmp_path / f"{name}.png")))
    assert np.array_equal(*pictures)
    options = Options(ckpt=tmp_path / "y.pt", vae=tiny_vae, device="cpu", sampler="heun")
    space = opened(options).space
    assert (space.scale, space.channels, space.factor) == (0.18215, 4, 8)


def test_the_hubs_repositories(tmp_path, run):
    """Each has a file of its own name; statistics come with the decoder."""
    for name, write in (("small", checkpoint), ("vavae", vae_files)):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    (tmp_path / "small" / "written-last.yaml").write_text(YAML)
    how = dict(HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_DISABLE_PROGRESS_BARS="1")
    flags = (
        "--device",
        "cpu",
        "--labels",
        1,
        "--num-sampling-steps",
        1,
        "--output",
        tmp_path / "x.png",
    )
    for flag, name, other in (("--ckpt", "small", "vavae"), ("--vae", "vavae", "small")):
        local = "--vae" if flag == "--ckpt" else "--ckpt", tmp_path / other / f"{other}.pt"
        with Hub(f"hustvl/{name}", tmp_path / name) as hub:
            succeeds(
                run("sample.py", *flags, flag, f"hustvl/{name}", *local, HF_ENDPOINT=hub.url, **how)
            )
        assert sorted(hub.asked) == sorted(path.name for path in (tmp_path / name).iterdir())
        # an older huggingface_hub takes what was interrupted for whole
        assert hub.asked[-1] == f"{name}.pt"
