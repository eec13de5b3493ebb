"""Files of guides: heads, entries, noise and latents, of JiT, RAE, DiT and LightningDiT."""

import numpy as np
import pytest
import torch
import yaml
from conftest import mistake
from decoders.vits import SMALL as SMALL_VIT
from decoders.vits import vit_files
from forks import refused, succeeds
from networks import error, opened, small
from reference_networks import jit
from test_jit import LABELS, START
from test_jit import build as build_jit
from test_jit import checkpoint as jit_file
from test_large_dit import build as build_large_dit
from test_lightning_dit import as_file
from test_lightning_dit import build as build_lightning
from test_rae import build as build_rae
from test_rae_config import changed

from accel import Sampler
from accel.checkpoints.facts import METADATA_KEY
from accel.config.options import Options
from accel.families.dit.network import DiT

GUIDE_SIZES = dict(hidden_size=80, depth=3, num_heads=1)
LATENTS = dict(output_type="latent", device="cpu")
RUN = dict(num_sampling_steps=3, **LATENTS)


def write_jit(folder):
    """Write a JiT, jit.pth, and return a function that writes a guide of it: other arguments of
    training → path.
    """
    jit_file(folder, build_jit()).rename(folder / "jit.pth")

    def guide(**arguments):
        return jit_file(folder, build_jit(1, **GUIDE_SIZES), **arguments)

    return guide


@pytest.fixture
def jits(tmp_path):
    return write_jit(tmp_path)


def guided_run(jits, tmp_path, *, guide=None, **options):
    guide = jits() if guide is None else guide
    return opened(Options(ckpt=tmp_path / "jit.pth", guide=guide, device="cpu", **options))


def written_out(f, g, z, scale, t_eps):
    """Four steps of Euler's method in float64; the interval of levels ends, outside, at 0.75."""
    x = z.double()
    for i in range(4):
        t = torch.full((len(x),), i / 4, dtype=torch.float64)
        clean, weak = (jit(net.state_dict(), x, t, LABELS, START) for net in (f, g))
        if i > 1:
            clean = weak + scale * (clean - weak)
        x = x + 0.25 * (clean - x) / max(1 - i / 4, t_eps)
    return x


def test_a_jit_is_guided_on_its_estimate_of_the_data(jits, tmp_path, here):
    """A single t_eps divides both estimates."""
    guide = jits(t_eps=0.05)
    flags = "--ckpt", tmp_path / "jit.pth", "--guide", guide, "--sampler", "euler", "--labels", 1, 5
    flags += "--device", "cpu", "--output-type", "latent", "--output", tmp_path / "x.npy"
    z = 1.5 * torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for more, t_eps in (((), 0.2), (("--t-eps", 0.3), 0.3)):
        succeeds(here("sample.py", *flags, *more))
        want = written_out(build_jit(), build_jit(1, **GUIDE_SIZES), z, 2.5, t_eps)
        assert error(torch.from_numpy(np.load(tmp_path / "x.npy")), want) < 5e-6


def test_a_guide_of_other_noise_is_refused_by_name(jits, tmp_path):
    guide = jits(noise_scale=1.0)
    with mistake("guide", "small.pth", "noise_scale 1", "jit.pth", "1.5"):
        guided_run(jits, tmp_path, guide=guide)
    assert guided_run(jits, tmp_path, guide=guide, noise_scale=2.0).settings.noise_scale == 2.0
    guided_run(jits, tmp_path, guide=jits(noise_scale=None))
    with mistake("guide", "small.pth", "noise_scale", "0.0"):
        guided_run(jits, tmp_path, guide=jits(noise_scale=0.0))


def test_notices_of_a_guide_name_what_changes_the_guide(jits, tmp_path, here):
    """The converter writes another entry, or the number of heads: flags change f alone."""
    guide = jits()
    flags = "--ckpt", tmp_path / "jit.pth", "--device", "cpu", "--output", tmp_path / "x.png"
    lines = succeeds(here("sample.py", *flags, "--guide", guide)).splitlines()
    (of_guide,) = (line for line in lines if "small.pth: the weights are those of" in line)
    assert of_guide.endswith("give --weights-entry NAME to scripts/convert_checkpoint.py")
    other = tmp_path / "other.pt"
    words = "--ckpt", guide, "--weights-entry", "model_ema2", "--output", other
    succeeds(here("scripts/convert_checkpoint.py", *words))
    assert (
        "model_ema2"
        not in succeeds(here("sample.py", *flags, "--guide", other)).partition("other.pt")[2]
    )


def test_the_number_of_heads_of_a_guide(tmp_path, here, capsys):
    """Assumed as that of the model of its size, with what changes it; unknown, it is refused."""
    torch.save({"ema": small(DiT).state_dict(), "args": dict(num_heads=2)}, tmp_path / "f.pt")
    usual = dict(hidden_size=384, depth=12, num_heads=6)
    torch.save({"ema": small(DiT, **usual).state_dict()}, tmp_path / "s.pt")
    f = Options(ckpt=tmp_path / "f.pt", **LATENTS)
    heads = opened(f.changed(guide=tmp_path / "s.pt")).guide.spec.num_heads
    text = capsys.readouterr().out
    assert heads == 6
    assert (
        "s.pt: specifies no number of heads, taken for 6, as models of its depth and width" in text
    )
    assert "give --num-heads N to scripts/convert_checkpoint.py" in text
    words = "--ckpt", tmp_path / "s.pt", "--num-heads", 4, "--output", tmp_path / "four.pt"
    succeeds(here("scripts/convert_checkpoint.py", *words))
    assert opened(f.changed(guide=tmp_path / "four.pt")).guide.spec.num_heads == 4


def test_a_guide_of_another_trained_size_is_refused(tmp_path):
    """No tensor of a Large-DiT says it. The size that is sampled does not matter."""
    for name, size in (("f", 64), ("small", 32), ("g", 64)):
        model = build_large_dit()
        facts = dict(family="Large-DiT", num_heads=model.n_heads, image_size=size)
        torch.save({"ema": model.state_dict(), METADATA_KEY: facts}, tmp_path / f"{name}.pt")
    f = Options(ckpt=tmp_path / "f.pt", image_size=128, **LATENTS)
    run = opened(f.changed(guide=tmp_path / "g.pt"))
    assert (run.settings.image_size, run.spec.image_size) == (128, 64)
    with mistake("guide", "small.pt", "image_size", "32", "f.pt", "64"):
        opened(f.changed(guide=tmp_path / "small.pt"))


@pytest.mark.parametrize(
    "section, name",
    (
        (dict(transport=dict(path_type="GVP")), "transport.path_type GVP"),
        (dict(data=dict(latent_multiplier=0.18)), "latent_scale 0.18"),
        (dict(data=dict(latent_multiplier=1.0)), "latent_norm False"),
        (dict(data=dict(latent_multiplier=1.0, latent_norm=True)), None),
    ),
)
def test_a_guides_configuration_is_of_the_same_latents(section, name, tmp_path):
    """The configuration of a LightningDiT lies beside its file."""
    for file in ("f.pt", "g.pt"):
        torch.save({"ema": as_file(build_lightning())}, tmp_path / file)
    (tmp_path / "g.yaml").write_text(yaml.safe_dump({"sample": {"cfg_scale": 2.0}, **section}))
    options = Options(ckpt=tmp_path / "f.pt", guide=tmp_path / "g.pt", **LATENTS)
    if name is None:
        assert opened(options).guide.spec.recommended["timestep_shift"] == 1
        return
    with mistake("guide", "g.pt", name):
        opened(options)


def test_a_guide_that_changes_nothing_is_said(jits, tmp_path, here):
    ckpt = tmp_path / "jit.pth"
    flags = "--ckpt", ckpt, "--device", "cpu", "--labels", 1, "--output-type", "latent", "--output"
    flags += (tmp_path / "x.npy", "--guide")
    for scale in (1, 0.5):
        text = succeeds(here("sample.py", *flags, jits(), "--cfg-scale", scale))
        line = f"autoguidance {scale} by small.pth (not used: give a --cfg-scale above 1)"
        assert line in text
    alone = np.load(tmp_path / "x.npy")
    assert "is the file of the network that it guides" in succeeds(here("sample.py", *flags, ckpt))
    assert np.abs(np.load(tmp_path / "x.npy") - alone).max() < 1e-5


# ---- RAE's configuration files, and its decoder ----


CONFIG = dict(
    stage_1=dict(
        target="stage1.RAE",
        params=dict(
            decoder_config_path="configs/decoder/ViTXL",
            pretrained_decoder_path="vit/model.pt",
            normalization_stat_path="vit/stat.pt",
        ),
    ),
    stage_2=dict(
        target="stage2.models.DDT.DiTwDDTHead",
        ckpt="rae.pt",
        params=dict(hidden_size=[144, 512], depth=[3, 2], num_heads=[2, 4], num_classes=8),
    ),
    sampler=dict(params=dict(sampling_method="euler", num_steps=4)),
    guidance=dict(
        method="autoguidance",
        scale=1.4,
        guidance_model=dict(
            target="stage2.models.DDT.DiTwDDTHead", ckpt="g.pt", params=dict(depth=[1, 1])
        ),
    ),
    misc=dict(latent_size=[24, 4, 4], num_classes=8, time_dist_shift_dim=8192),
)


def write_rae(folder):
    """Write a RAE, its guide and its decoder; return a function that writes their configuration."""
    vit_files(folder / "vit", SMALL_VIT._replace(channels=24, patch=16))
    torch.save(build_rae().state_dict(), folder / "rae.pt")
    guide = build_rae(1, hidden_size=(72, 256), depth=(1, 1), num_heads=(1, 2))
    torch.save(guide.state_dict(), folder / "g.pt")

    def write(**changes):
        path = folder / f"{len(list(folder.iterdir()))}.yaml"
        path.write_text(yaml.safe_dump(changed(CONFIG, **changes)))
        return path

    return write


@pytest.fixture
def raes(tmp_path):
    return write_rae(tmp_path)


@pytest.mark.parametrize(
    "changes, names",
    (
        (dict(misc__latent_size=[12, 4, 4]), ("12 channels and side 4", "rae.pt of 24 and 4")),
        (dict(misc__latent_size=[24, 8, 8]), ("24 channels and side 8", "rae.pt of 24 and 4")),
    ),
)
def test_a_configuration_of_other_networks_than_its_files_is_refused(changes, names, raes):
    with mistake("config", *names):
        opened(Options(config=str(raes(**changes)), device="cpu"))


def test_another_familys_network_is_refused_with_a_configuration(raes, jits, tmp_path, here):
    flags = "--config", raes(), "--device", "cpu", "--output", tmp_path / "x.png"
    text = succeeds(here("sample.py", *flags))
    assert "3 EULER steps, shift 0.707107 · autoguidance 1.4 by g.pt on 24 channels" in text
    assert "yaml: specifies ckpt " in text and "g.pt; flags override it" in text
    assert "image size 64, guidance channels 24, timestep shift 0.707107, sampler euler" in text
    for more, words in (
        (("--model", "DiT-Demo/2"), "--model DiT-Demo/2: is a DiT, and --config"),
        (("--ckpt", tmp_path / "jit.pth"), "jit.pth: is a JiT, and --config"),
        (("--guide", tmp_path / "jit.pth"), "jit.pth: is a JiT, and --config"),
        (("--latent-stats", tmp_path / "none.pt"), "sample.py: --latent-stats"),
    ):
        line = refused(here("sample.py", *flags, *more))
        assert words in line
    line = refused(here("sample.py", "--config", raes(stage_2__ckpt="none.pt")))
    assert line.endswith("cannot find none.pt; put it there, or give --ckpt\n")
    with mistake("", "ViTXL_n08/model.pt"):
        opened(Options(ckpt=tmp_path / "rae.pt", device="cpu"))
    pixels = "--ckpt", tmp_path / "jit.pth", "--latent-stats", tmp_path / "vit" / "stat.pt"
    assert "samples pixels, without a decoder" in refused(here("sample.py", *pixels))


def test_a_guide_that_was_not_loaded_is_not_replaced_by_the_null_class(raes):
    """A Sampler of a configuration with a guide, made for a scale of 1."""
    with Sampler(
        config=raes(), cfg_scale=1, device="cpu", output_type="latent", num_sampling_steps=2
    ) as sampler:
        assert sampler.latents([1], seed=0).shape[0] == 1
        with mistake("cfg_scale", "1.4", "guide"):
            sampler.latents([1], seed=0, cfg_scale=1.4)
