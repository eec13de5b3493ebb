"""Autoguidance: a second network's estimate in place of the null label's, by hand and by every
door: g + s·(f − g), both of the same label.
"""

import re
import shutil

import numpy as np
import pytest
import torch
from conftest import fill, mistake
from forks import refused, succeeds
from jobs import files
from networks import large_inside, network_of, ready, small
from safetensors.torch import load_file

from accel import Sampler
from accel.checkpoints.facts import METADATA_KEY
from accel.families.dit.network import DiT, DiT_models
from accel.families.sit.network import SiT
from accel.runtime.network import EagerNetwork
from accel.sampling import denoise, upstream_noise
from accel.sampling.ancestral import Ancestral
from accel.sampling.autoguidance import WithGuide
from accel.sampling.flow import Euler
from accel.sampling.guidance import Autoguidance, guidance_of
from diffusion import create_diffusion

SCALE = 1.7
CHANNELS = 3
INTERVAL = (0.2, 0.8)
LABELS = torch.tensor([3, 0, 5])
Z = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(4))
DEMO_SIZE = dict(input_size=16, hidden_size=216, depth=2, num_heads=3, num_classes=8)


def networks_of(kind=DiT, **changes):
    """Return a network and a smaller one of other patches, with random weights."""
    f = small(kind, **changes)
    guide = dict(hidden_size=96, depth=1, num_heads=2, patch_size=4)
    return f, fill(kind(**{**dict(input_size=8, num_classes=8), **changes, **guide}), seed=9)


def by_hand(f, g, scale, interval, x, t, y, level):
    """The guided estimate (n, C', H, W), each network evaluated for all rows of x."""
    out = f(x, t, y)
    if not interval[0] <= level <= interval[1]:
        return out
    weak = g(x, t, y)[:, :CHANNELS]
    return torch.cat([weak + scale * (out[:, :CHANNELS] - weak), out[:, CHANNELS:]], dim=1)


@torch.no_grad()
def upstreams(f, g, z, y, steps, scale=SCALE, interval=INTERVAL):
    """Latents by upstream's loop over twice z: 2n rows of noise a step, from torch's generator."""

    def evaluate(x, t, y):
        half = slice(len(x) // 2)
        level = float(t[0]) / 1000
        return torch.cat([by_hand(f, g, scale, interval, x[half], t[half], y[half], level)] * 2)

    diffusion = create_diffusion(str(steps), learn_sigma=f.learn_sigma)
    both = torch.cat([z, z])
    arguments = dict(clip_denoised=False, model_kwargs=dict(y=torch.cat([y, y])))
    return diffusion.p_sample_loop(evaluate, both.shape, both, **arguments)[: len(z)]


@torch.no_grad()
def flows(f, g, z, y, steps, interval):
    """Latents of Euler's method in float64."""
    f, g = f.double(), g.double()
    x = z.double()
    for i in range(steps):
        t = torch.full((len(x),), i / steps, dtype=torch.float64)
        x = x + by_hand(f, g, SCALE, interval, x, t, y, (steps - i) / steps) / steps
    f.float(), g.float()
    return x


def sampled(pair, process, interval=INTERVAL, scale=SCALE):
    """Latents by the loop of all commands."""
    guidance = guidance_of(scale, None, guide=True, channels=CHANNELS, interval=interval)
    draw = upstream_noise(Z, guidance.noise_rows)
    return denoise(pair, process, guidance, Z, LABELS, draw)


def close(got, want, tolerance=2e-6):
    error = float((got.double() - want.double()).norm() / want.norm())
    assert error < tolerance and want.std() > 0.1, error


# ---- values ----


def test_ancestral_sampling_is_upstreams_loop_with_its_noise():
    f, g = networks_of()
    torch.manual_seed(3)
    want = upstreams(f, g, Z, LABELS, 9)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    got = sampled(WithGuide(EagerNetwork(f), EagerNetwork(g)), Ancestral(9))
    close(got, want)
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(3)
    alone = upstreams(f, g, Z, LABELS, 9, scale=1)
    assert (got - alone).abs().max() > 0.05  # guidance is no small matter here


def test_a_flows_interval_has_its_ends():
    """Ten steps: levels 0.8 and 0.2 are guided, 0.9 and 0.1 are not."""
    f, g = networks_of(SiT, learn_sigma=False)
    pair = WithGuide(EagerNetwork(f), EagerNetwork(g))
    for interval, count in (((0.2, 0.8), 7), ((0.0, 1.0), 10), ((0.25, 0.75), 5)):
        assert (
            sum(Autoguidance(2, 3, interval).at((10 - i) / 10).copies == 2 for i in range(10))
            == count
        )
        close(sampled(pair, Euler(10), interval), flows(f, g, Z, LABELS, 10, interval))


@pytest.mark.parametrize("tier, tolerance", [("fp16", 3e-3), ("exact", 3e-6)])
def test_accelerated_networks(tier, tolerance):
    """Each network has its table of conditioning; the kernels are their references."""
    f, g = networks_of()
    pair = WithGuide(network_of(f, tier), network_of(g, tier))
    torch.manual_seed(3)
    want = upstreams(f, g, Z, LABELS, 9)
    torch.manual_seed(3)
    close(sampled(pair, Ancestral(9)), want, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("tier, tolerance", [("fp16", 3e-3), ("exact", 3e-6), ("fp32", 3e-6)])
def test_captured_steps_hold_both_networks(tier, tolerance, guides, weights):
    """Also after a run with more labels."""
    how = dict(ckpt=weights, guide=guides["guide"], model="DiT-Demo/2", num_sampling_steps=8)
    how |= dict(cfg_scale=SCALE, guidance_interval=INTERVAL, output_type="latent")
    f, g = demo_networks(weights, guides["guide"], hidden_size=72, num_heads=1)
    noise = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    with Sampler(**how, precision=tier, sampler="ddim", device="cuda") as sampler:
        with torch.no_grad():
            want = ddim(f, g, noise, torch.tensor([1, 6]), 8)
        for _ in range(2):
            close(sampler.latents([1, 6], noise=noise).cpu(), want, tolerance)
            sampler.latents(range(8))


def ddim(f, g, z, y, steps):
    """Latents by upstream's deterministic loop."""

    def evaluate(x, t, y):
        return by_hand(f, g, SCALE, INTERVAL, x, t, y, float(t[0]) / 1000)

    loop = create_diffusion(str(steps)).ddim_sample_loop
    return loop(evaluate, z.shape, z, clip_denoised=False, model_kwargs=dict(y=y))


# ---- doors ----


@pytest.fixture(scope="module")
def guides(tmp_path_factory):
    """Files of guides of the demo model: {name: path}."""
    folder = tmp_path_factory.mktemp("guides")
    shapes = {
        "guide": dict(hidden_size=72, num_heads=1),
        "other": dict(hidden_size=72, num_heads=1),
        "classes": dict(num_classes=5),
        "no-null": dict(class_dropout_prob=0),
        "latents": dict(in_channels=3),
        "large": {},
        "sides": dict(input_size=8),
    }
    paths = {}
    for seed, (name, changes) in enumerate(shapes.items()):
        model = fill(DiT(**{**DEMO_SIZE, **changes}), seed)
        model = large_inside(model) if name == "large" else model
        paths[name] = folder / f"{name}.pt"
        heads = dict(num_heads=model.num_heads)
        torch.save({"ema": model.state_dict(), "args": heads}, paths[name])
    paths["SiT"] = folder / "SiT.pt"
    facts = dict(family="SiT", num_heads=3, num_classes=8)
    torch.save({"ema": fill(SiT(**DEMO_SIZE)).state_dict(), METADATA_KEY: facts}, paths["SiT"])
    return paths


def demo_networks(weights, path, **changes):
    f = DiT_models["DiT-Demo/2"]().eval()
    f.load_state_dict(load_file(weights))
    state = torch.load(path, weights_only=True)["ema"]
    g = DiT(**{**DEMO_SIZE, **changes}).eval()
    g.load_state_dict(state)
    return f, g


def test_the_command_and_python_make_it(demo, weights, guides, here, tmp_path):
    flags = ["--num-sampling-steps", 5, "--cfg-scale", SCALE, "--guidance-interval", *INTERVAL]
    flags += ["--labels", 1, 6, "--seed", 2, "--output-type", "latent"]
    command = ["sample.py", *demo, *flags, "--guide", guides["guide"]]
    text = succeeds(here(*command, "--output", tmp_path / "x.npy"))
    assert "5 steps · autoguidance 1.7 by guide.pt at levels 0.2 to 0.8 ·" in text
    got = np.load(tmp_path / "x.npy")
    f, g = demo_networks(weights, guides["guide"], hidden_size=72, num_heads=1)
    torch.manual_seed(2)
    want = upstreams(f, g, torch.randn(2, 4, 16, 16), torch.tensor([1, 6]), 5)
    close(torch.from_numpy(got), want)

    how = dict(num_sampling_steps=5, guidance_interval=INTERVAL, device="cpu", precision="fp32")
    how |= dict(output_type="latent", seed=2)
    sources = (
        dict(ckpt=weights, guide=guides["guide"], model="DiT-Demo/2"),
        dict(model=f, guide=g),
    )
    for source in sources:
        with Sampler(**source, **how, cfg_scale=3.0) as sampler:
            assert np.array_equal(sampler.latents([1, 6], cfg_scale=SCALE).numpy(), got)
            both = sampler.latents([1, 6])
            assert not np.array_equal(both.numpy(), got)


def test_weights_without_a_null_class(guides, weights):
    how = dict(num_classes=8, output_type="latent", device="cpu", num_sampling_steps=2)
    for f, g in (("no-null", "guide"), ("no-null", "no-null")):
        _, pipeline = ready(ckpt=guides[f], guide=guides[g], cfg_scale=2, image_size=128, **how)
        assert pipeline.guidance == Autoguidance(2.0) and pipeline.latents([1], 0).std() > 0.1
    for f, g in ((weights, "no-null"), (guides["no-null"], "guide")):
        with mistake("labels", "null"):
            ready(ckpt=f, guide=guides[g], labels=("null",), **how)


def test_a_guide_that_overflows_takes_both_to_bfloat16(guides, weights, monkeypatch, capsys):
    monkeypatch.setattr("accel.runtime.precision.default_tier", lambda device: "fp16")
    monkeypatch.setattr("accel.runtime.precision.supports", lambda tier, device: True)
    how = dict(ckpt=weights, model="DiT-Demo/2", guide=guides["large"], num_sampling_steps=2)
    how |= dict(device="cpu", output_type="latent")
    _, pipeline = ready(**how)
    assert "the guide's weights overflow float16: sampling in bfloat16" in (capsys.readouterr().out)
    assert pipeline.tier == "bf16"
    assert {pipeline.network.network.dtype, pipeline.network.guide.dtype} == {torch.bfloat16}
    assert pipeline.latents([1, 2], 0).isfinite().all()
    with mistake("precision", "fp16"):
        ready(**how, precision="fp16")


def test_a_guide_whose_family_no_file_says_is_of_the_first_networks(tmp_path, capsys):
    """A SiT's entries are a DiT's."""
    for name, depth, more in (("f", 2, dict(path_type="Linear")), ("g", 1, {})):
        model = fill(SiT(**{**DEMO_SIZE, "depth": depth}))
        args = dict(num_heads=3, **more)
        torch.save({"ema": model.state_dict(), "args": args}, tmp_path / f"{name}.pt")
    how = dict(device="cpu", output_type="latent", sampler="euler", num_sampling_steps=3)
    run, _ = ready(ckpt=tmp_path / "f.pt", guide=tmp_path / "g.pt", **how)
    assert run.guide.spec.family.name == run.spec.family.name == "SiT"
    line = "g.pt: names no family, taken for a SiT (velocity); if it is not: give --model "
    assert line in capsys.readouterr().out


SAME = "; a guide has the family, classes, latents and noise of the network that it guides"
REFUSED = {
    "classes": f"has num_classes 5, and demo.safetensors 8{SAME}",
    "latents": f"has channels of latents 3, and demo.safetensors 4{SAME}",
    "sides": f"has a side of trained latents 8, and demo.safetensors 16{SAME}",
    "SiT": f"has the family SiT, and demo.safetensors DiT{SAME}",
    "missing": "no such file; published names are",
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_networks_guide_is_refused_in_a_line(name, demo, guides, here, weights):
    path = guides.get(name, "missing.pt")
    done = here("sample.py", *demo, "--guide", path, "--num-sampling-steps", 1)
    error = refused(done).replace(str(weights), weights.name)
    assert error.startswith(f"sample.py: --guide {path}: {REFUSED[name]}")


@pytest.mark.parametrize("layout", ("rows=2", "tokens=2"))
def test_ranks_do_not_share_two_networks(layout, demo, guides, here):
    done = here("sample_ddp.py", *demo, "--guide", guides["guide"], "--parallel", layout)
    assert f"--parallel {layout}: " in refused(done)


def test_an_fid_job_resumes_with_its_guide_alone(demo, guides, here, tmp_path):
    job = ["--num-fid-samples", 4, "--per-proc-batch-size", 2, "--num-sampling-steps", 3]
    job = ["sample_ddp.py", *demo, *job, "--cfg-scale", SCALE, "--sample-dir", tmp_path, "--guide"]
    succeeds(here(*job, guides["guide"]))
    [archive] = tmp_path.glob("*-cfg-1.7-guide-guide-seed-0.npz")
    made = files(tmp_path)
    archive.unlink()
    archive.with_suffix("").joinpath("000003.png").unlink()
    # Of another guide under the same name, which is in the folder's.
    other = tmp_path / "elsewhere" / "guide.pt"
    other.parent.mkdir()
    shutil.copy(guides["other"], other)
    line = refused(here(*job, other))
    assert re.search(
        r"--guide \(contents\) [0-9a-f]{16}: the pictures in \S+ were begun with", line
    )
    shutil.rmtree(other.parent)
    succeeds(here(*job, guides["guide"]))
    assert files(tmp_path) == made
