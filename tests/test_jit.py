"""JiT: its equations in float64, its tiers, its sampler, its files and modules, FID jobs."""

import argparse
import json
import shutil

import jobs
import networks
import numpy as np
import pytest
import torch
from conftest import mistake
from forks import refused, succeeds
from networks import error, network_of, opened, recognise, recognised, with_norms
from PIL import Image
from reference_networks import jit
from torch import nn

from accel import Sampler, accelerate
from accel.checkpoints.loading import WeightFiles
from accel.config.options import Options
from accel.errors import InputRef
from accel.families import DEMO
from accel.families.blocks import RMSFinalLayer
from accel.families.jit import FAMILY as JIT
from accel.families.jit.network import JiT, JiT_models
from accel.jobs.fid.folder import Batches, Plan
from accel.jobs.fid.noise import PictureNoise, UpstreamNoise
from accel.runtime.network import EagerNetwork
from accel.sampling import denoise
from accel.sampling.flow import Euler, Heun
from accel.sampling.guidance import Guidance, closed_interval
from accel.tensors.shapes import shapes_only

# heads of 80 as in H; 16 tokens of the picture and 3 of the label
START = 2
SMALL = dict(
    input_size=32,
    patch_size=8,
    hidden_size=160,
    depth=4,
    num_heads=2,
    num_classes=8,
    bottleneck_dim=12,
    in_context_len=3,
    in_context_start=START,
)
ARGS = dict(
    img_size=32,
    class_num=8,
    cfg=2.5,
    interval_min=0.25,
    interval_max=1.0,
    noise_scale=1.5,
    t_eps=0.2,
    num_sampling_steps=4,
    sampling_method="heun",
    in_context_start=START,
)
LABELS = torch.tensor([1, 5])


def build(seed=0, **changes):
    model = with_norms(JiT(**{**SMALL, **changes}), seed)
    model.final_layer.linear.weight.data.mul_(0.3)
    return model


def inputs():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, 32, 32, generator=generator)
    return x, torch.tensor([0.0, 0.31, 0.9, 1.0]), torch.tensor([1, 5, 8, 8])


def checkpoint(folder, model, **changes):
    """A training run's file: the average that is sampled, other weights, arguments."""
    of_net = {f"net.{name}": value for name, value in model.state_dict().items()}
    others = {name: value + 0.1 for name, value in of_net.items()}
    arguments = argparse.Namespace(**{**ARGS, "lr": None, **changes})
    content = {"model": others, "model_ema1": of_net, "model_ema2": others}
    torch.save({**content, "optimizer": {}, "epoch": 7, "args": arguments}, folder / "small.pth")
    return folder / "small.pth"


@torch.no_grad()
def written_out(model, z, labels, steps, heun=True, cfg=2.5, low=0.25, high=1.0, t_eps=0.2):
    """The flow in float64: guidance on the velocity, of each evaluation by its own time."""
    state = model.state_dict()

    def velocity(x, t):
        rows = torch.cat([x, x])
        y = torch.cat([labels, torch.full_like(labels, 8)])
        clean = jit(state, rows, torch.full((len(y),), t), y, START)
        cond, uncond = ((clean - rows) / max(1 - t, t_eps)).chunk(2)
        guides = t < high and (low == 0 or t > low)
        return uncond + (cfg if guides else 1.0) * (cond - uncond)

    x = z.double()
    for i in range(steps):
        t = i / steps
        end = (i + 1) / steps
        slope = velocity(x, t)
        if heun and i < steps - 1:
            slope = (slope + velocity(x + slope / steps, end)) / 2
        x = x + slope / steps
    return x


def test_every_norm_has_the_originals_epsilon():
    model = build()
    names = ("x_embedder.proj2.weight", "x_embedder.proj2.bias", "pos_embed")
    for name in names:
        model.get_parameter(name).data.mul_(1e-3)
    x, t, y = inputs()
    want = jit(model.state_dict(), x, t, y, START)
    assert error(model(x, t, y).detach(), want) < 4e-6


@pytest.mark.parametrize("heun", (True, False))
@pytest.mark.parametrize("low, high", ((0.0, 1.0), (0.25, 0.75), (0.25, 1.0)))
def test_sampling_is_what_is_written_out(heun, low, high):
    """The interval's ends are hit: they are outside."""
    model = build()
    z = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    want = written_out(model, 1.5 * z, LABELS, 4, heun, low=low, high=high)
    data = dict(t_eps=0.2, noise_scale=1.5)
    process = (Heun if heun else Euler)(4, **data, heun_by_start=False)
    inside = closed_interval(JIT.interval_rule, (1 - high, 1 - low))
    guidance = Guidance(2.5, 8, 3, inside)
    assert len(process.times()) == (7 if heun else 4)
    for network, most in ((EagerNetwork(model), 5e-6), (network_of(model, "fp16"), 5e-3)):
        assert error(denoise(network, process, guidance, z, LABELS, None), want) < most
    with_ends = Guidance(2.5, 8, 3, (1 - high, 1 - low))
    by_start = (Heun if heun else Euler)(4, **data)
    if low:
        got = denoise(EagerNetwork(model), process, with_ends, z, LABELS, None)
        assert error(got, want) > 1e-3
    if low and heun:
        assert error(denoise(EagerNetwork(model), by_start, guidance, z, LABELS, None), want) > 1e-3


def test_two_estimates_are_not_one(tmp_path, here):
    """A fork's last layer has twice the channels."""
    model = build()
    model.final_layer = RMSFinalLayer(SMALL["hidden_size"], SMALL["patch_size"], 6)
    path = checkpoint(tmp_path, with_norms(model))
    line = "its last layer makes 6 channels, and an estimate of the clean picture has 3; nothing"
    assert line in refused(here("sample.py", "--ckpt", path, "--device", "cpu"))


@pytest.mark.parametrize("name", ("JiT-B/16", "JiT-B/32"))
def test_the_first_noise_follows_from_the_pictures_size(name):
    """Not from the model's name."""
    for side, scale in ((256, 1), (512, 2), (1024, 4), (64, 1)):
        with shapes_only():
            model = JiT_models[name](input_size=side)
        state = model.state_dict()
        found = recognised("x.pth", state, {"model": name})
        assert found.spec.defaults.noise_scale == scale
        found = recognised("x.pth", state, {"model": name, "noise_scale": 1.5})
        assert found.spec.recommended["noise_scale"] == 1.5


def test_an_assumed_scale_of_the_first_noise_is_printed(tmp_path, capsys):
    path = checkpoint(tmp_path, build(), noise_scale=None)
    for flags, lines in (({}, 1), ({"noise_scale": 1.0}, 0)):
        opened(Options(ckpt=path, device="cpu", output_type="latent", **flags))
        assert capsys.readouterr().out.count("taken for 1 as at 32 px") == lines


def test_an_unknown_start_of_label_tokens_is_refused():
    for facts in ({}, {"in_context_start": 4}):
        with mistake("ckpt", "in_context_start"):
            recognise("x.pth", build().state_dict(), facts)


def test_the_command_believes_the_file(tmp_path, here):
    """Which entry, size, scale, interval, sampler and noise; flags override them."""
    model = build()
    flags = "--device", "cpu", "--labels", 1, 5, "--seed", 3, "--ckpt", checkpoint(tmp_path, model)
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(2, 3, 32, 32, generator=generator)
    latent = "--output-type", "latent", "--output", tmp_path / "x.npy"
    text = succeeds(here("sample.py", *flags, *latent))
    assert 'the weights are those of "model_ema1.net"' in text and "4 HEUN steps · cfg 2.5" in text
    assert (
        error(torch.from_numpy(np.load(tmp_path / "x.npy")), written_out(model, 1.5 * z, LABELS, 4))
        < 5e-6
    )
    more = "--sampler", "euler", "--num-sampling-steps", 3, "--cfg-scale", 1.5, "--t-eps", 0.1
    more += "--noise-scale", 0.5, "--guidance-interval", 0, 1
    succeeds(here("sample.py", *flags, *more, *latent))
    want = written_out(model, 0.5 * z, LABELS, 3, False, cfg=1.5, low=0.0, t_eps=0.1)
    assert error(torch.from_numpy(np.load(tmp_path / "x.npy")), want) < 5e-6
    succeeds(here("sample.py", *flags, *more, "--output", f"{tmp_path}/folder/"))
    for picture, pixels in zip(sorted((tmp_path / "folder").iterdir()), want, strict=True):
        levels = ((pixels + 1) / 2 * 255).clamp(0, 255).round().permute(1, 2, 0)
        assert np.abs(np.asarray(Image.open(picture)).astype(int) - levels.numpy()).max() <= 1


def test_the_digest_covers_where_label_tokens_enter(tmp_path):
    def digest(start):
        file = checkpoint(tmp_path, build(), in_context_start=start)
        return WeightFiles(InputRef(str(file))).checkpoint().digest()

    assert digest(1) != digest(START)
    with shapes_only():
        published = JiT_models["JiT-B/16"]().state_dict()
    for says, facts in (({}, {}), ({"in_context_start": 4}, {}), ({"in_context_start": 5},) * 2):
        assert recognise("x.pth", published, {"model": "JiT-B/16", **says}).facts == facts


def test_what_is_not_sampled_is_refused_in_a_line(tmp_path, here):
    flags = "--device", "cpu", "--labels", 1, "--output", tmp_path / "x.png"
    ckpt = "--ckpt", checkpoint(tmp_path, build())
    for more, words in (
        ((*ckpt, "--image-size", 64), "--image-size 64: a JiT only samples the size"),
        ((*ckpt, "--noise-scale", 0), "--noise-scale 0"),
        ((*ckpt, "--vae", DEMO / "vae"), "samples pixels, without a decoder"),
        ((*ckpt, "--vae", "no-such-owner/decoder"), "samples pixels"),  # nothing is fetched
        (("--model", "JiT-L/16", "--vae", "ema"), "JiT-L/16 samples pixels"),
        (("--model", "JiT-L/16"), "no published weights"),
        (("--model", "DiT-Demo/2", "--noise-scale", 2), "--noise-scale 2: is for networks that"),
    ):
        assert words in refused(here("sample.py", *flags, *more))
    for name, value, says in (
        ("noise_scale", 0.0, "specifies noise_scale 0.0: must be from 0.001 to 1000; save it"),
        ("interval_min", "x", "its training arguments cannot be read (unsupported"),
        ("interval_max", 0.25, "specifies guidance_interval (0.75, 0.75): must be two, the lower"),
        ("cfg", "x", "specifies cfg_scale x"),
        ("img_size", "x", "specifies image_size x"),
    ):
        ckpt = checkpoint(tmp_path, build(), **{name: value})
        line = refused(here("sample.py", *flags, "--ckpt", ckpt))
        assert f"small.pth: {says}" in line
    for name, value, words in (
        (
            "img_size",
            64,
            "--image-size 64: a JiT only samples the size that it was trained for",
        ),
        ("class_num", 9, "weights lack (label table of 9 rows)"),
    ):
        ckpt = checkpoint(tmp_path, build(), **{name: value})
        assert words in refused(here("sample.py", *flags, "--ckpt", ckpt))


def test_heads_of_training_beside_the_network_are_left_out(tmp_path):
    model = build()
    file = checkpoint(tmp_path, model)
    content = torch.load(file, weights_only=False)
    content["model_ema1"] |= {
        f"{head}_head.weight": torch.ones(2, 2) for head in ("time", "rotation")
    }
    torch.save(content, file)
    with Sampler(file, device="cpu", output_type="latent", num_sampling_steps=2) as sampler:
        assert sampler.latents(3).shape == (1, 3, 32, 32)


class Original(networks.Original):
    """The original class as callers hold it, written from its definition."""

    in_context_start = START

    def forward(self, x, t, y):
        return jit(self.state_dict(), x, t, y, START).float()


def test_modules_are_accelerated_sampled_and_refreshed():
    model = build()
    x, t, y = inputs()
    for module in (model, Original(model)):
        assert error(accelerate(module, "fp32")(x, t, y), module(x, t, y).double()) < 5e-6
    options = dict(device="cpu", num_sampling_steps=3, cfg_scale=2.0)
    changed = build()
    changed.in_context_posemb.data.add_(1)
    with Sampler(Original(model), **options) as sampler:
        before = sampler.latents([1, 5], seed=1)
        (picture, _) = sampler.sample([1, 5], seed=1)
        assert picture.size == (32, 32) and sampler.run.settings.sampler == "heun"
        sampler.refresh(Training(changed).state_dict())
        after = sampler.latents([1, 5], seed=1)
    with Sampler(changed, **options) as sampler:
        assert torch.equal(sampler.latents([1, 5], seed=1), after)
    assert not torch.equal(after, before)
    fast = accelerate(model, "fp32")
    fast.load_state_dict(Training(changed).state_dict())
    assert torch.equal(fast(x, t, y), accelerate(changed, "fp32")(x, t, y))


class Training(nn.Module):
    """A module of training, as the original's, which holds the network."""

    def __init__(self, net):
        super().__init__()
        self.net = net


@pytest.mark.parametrize("door", (accelerate, Sampler))
def test_a_module_that_holds_the_network_is_refused_by_its_name(door):
    with mistake("", "Training", ".net"):
        door(Training(Original(build())))


def test_ranks_do_not_share_the_tokens_of_a_picture(tmp_path):
    words = ["--device", "cpu", "--ckpt", checkpoint(tmp_path, build()), "--labels", 1]
    words += ["--output-type", "latent", "--num-sampling-steps", 2, "--output", tmp_path / "x.npy"]
    text = jobs.run(2, *words, "--parallel", "tokens=2", status=2)
    assert "tokens are not divided where label tokens stand before them" in text


def test_labels_of_an_fid_job_are_class_by_class(tmp_path):
    """A rank makes a contiguous run of each round; its seed is the job's plus its number."""
    plan = Plan(tmp_path, 16, 2, 5, 4, 32, (3, 32, 32), labels="class_by_class")
    made = {}
    for rank in range(2):
        batches = Batches(plan, rank, 2)
        noise = UpstreamNoise(batches, torch.device("cpu"), Heun(2))
        torch_noise = torch.Generator().manual_seed(5 + rank)
        for batch in batches.to_draw(()):
            z, labels, _ = noise.batch(batch)
            assert torch.equal(z, torch.randn(2, 3, 32, 32, generator=torch_noise))
            made |= dict(zip(batches.pictures(batch), labels.tolist()))
            by_picture = PictureNoise(Batches(plan, 0, 1), torch.device("cpu"), Heun(2))
        assert list(Batches(plan, rank, 2).pictures(2 + rank)) == [4 + 2 * rank, 5 + 2 * rank]
    assert [made[number] for number in range(16)] == [i // 4 for i in range(16)]
    _, labels, _ = by_picture.batch(3)
    assert labels.tolist() == [1, 1]


def test_classes_of_unequal_number_are_said(tmp_path, here):
    job = "--device", "cpu", "--ckpt", checkpoint(tmp_path, build()), "--sample-dir", tmp_path
    for count, said in ((16, False), (10, True)):
        text = succeeds(
            here("sample_ddp.py", *job, "--num-fid-samples", count, "--global-seed", count)
        )
        assert (f"{count} pictures are not a multiple of 8 classes" in text) == said
    more = here("sample_ddp.py", *job, "--num-fid-samples", 16, "--global-seed", 10)
    assert "this order of labels depends on the number of pictures" in refused(more)


def test_an_fid_job_resumes_with_the_values_that_are_implied(tmp_path, here):
    """Each option that decides the pictures, given with the value that the file implies, and not.
    A record of former versions has how the number of heads, the entry and the order were given.
    """
    ckpt = checkpoint(tmp_path, build())
    job = ["--device", "cpu", "--ckpt", ckpt, "--num-fid-samples", 8, "--sample-dir", tmp_path]
    given = ["--image-size", 32, "--num-classes", 8, "--num-heads", 2, "--vae", "pixels"]
    given += ["--weights-entry", "model_ema1", "--cfg-scale", 2.5, "--guidance-channels", 3]
    given += ["--guidance-interval", 0, 0.75, "--num-sampling-steps", 4, "--sampler", "heun"]
    given += ["--timestep-shift", 1, "--noise-scale", 1.5, "--t-eps", 0.2, "--eta", 0]
    given += ["--precision", "fp32", "--vae-precision", "fp32", "--global-seed", 0]
    given += ["--per-proc-batch-size", 32, "--balanced-labels"]
    former = {"--num-heads": 2, "--weights-entry": None, "--balanced-labels": True}
    for first, then in ((given, []), ([], given)):
        succeeds(here("sample_ddp.py", *job, *first))
        (record,) = tmp_path.glob("*/.job/settings.json")
        (archive,) = tmp_path.glob("*.npz")
        made = archive.read_bytes()
        archive.unlink()
        archive.with_suffix("").joinpath("000003.png").unlink()
        succeeds(here("sample_ddp.py", *job, *then))
        assert archive.read_bytes() == made
        record.write_text(json.dumps({**json.loads(record.read_text()), **former}))
        succeeds(here("sample_ddp.py", *job, *then))
        assert "--t-eps 0.3: " in refused(here("sample_ddp.py", *job, *then, "--t-eps", 0.3))
        for path in tmp_path.glob("JiT*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
