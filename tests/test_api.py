"""`from accel import Sampler`: the pictures of sample.py, from Python."""

import copy
import gc
import pickle
import re
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from math import nan
from pathlib import Path

import forks
import numpy as np
import pytest
import torch
from conftest import ROOT, fill, mistake
from diffusers import AutoencoderKL
from networks import (
    DEVICES,
    FourChannels,
    Original,
    Otherwise,
    pipeline,
    small,
    transformer,
    upstream,
)
from PIL import Image
from test_guide_files import write_rae
from torch import nn
from torch.optim.swa_utils import AveragedModel

from accel import Sampler, accelerate
from accel.errors import UsageError
from accel.families import DEMO
from accel.runtime.precision import SWITCHES
from diffusion import create_diffusion
from models import DiT, DiT_models


def demo(device="cpu", model="DiT-Demo/2", **options):
    return Sampler(model, device=device, **{"num_sampling_steps": 4, **options})


Z = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(7))
LATENT = dict(device="cpu", output_type="latent")


@DEVICES
def test_pictures_are_those_of_the_command(device, here, tmp_path):
    """To the bit, again and again, with other labels, seeds, steps and guidance in between."""
    cases = [
        ((1, 5, 7, 0, 2), dict(seed=3, num_sampling_steps=6, cfg_scale=2.5)),
        ((4,), dict(seed=0, num_sampling_steps=3, cfg_scale=4.0)),
    ]
    with demo(device) as sampler:
        for labels, how in [*cases, cases[0]]:
            pictures = sampler.sample(labels, **how)
            folder = tmp_path / str(len(labels))
            flags = [
                part
                for name, value in how.items()
                for part in ("--" + name.replace("_", "-"), value)
            ]
            command = [
                "sample.py",
                "--model",
                "DiT-Demo/2",
                "--device",
                device,
                "--labels",
                *labels,
                *flags,
            ]
            if not folder.exists():
                forks.succeeds(here(*command, "--output", f"{folder}/"))
            for picture, file in zip(pictures, sorted(folder.iterdir()), strict=True):
                want = np.asarray(Image.open(file))
                assert (
                    picture.mode == "RGB"
                    and np.array_equal(np.asarray(picture), want)
                    and want.std() > 1
                )


def test_labels_by_name_number_or_alone_and_defaults_of_the_constructor(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)  # lines of a log come every 30 s
    with demo(seed=5, cfg_scale=3.0, batch_size=1) as sampler:
        both = sampler.latents(["planet", 3], progress=True)
        assert "8/8" in capsys.readouterr().err  # the steps of all batches
        assert torch.equal(
            both, sampler.latents((0, "ball"), seed=5, num_sampling_steps=4, cfg_scale=3.0)
        )
        for five in (5, np.int64(5), torch.tensor(5)):
            assert (
                torch.equal(sampler.latents("sea"), sampler.latents(five))
                and len(sampler.latents(five)) == 1
            )
        for other in (dict(seed=0), dict(num_sampling_steps=5), dict(cfg_scale=4.0)):
            assert not torch.equal(both, sampler.latents([0, 3], **other))
        assert torch.equal(both, sampler.latents([0, 3]))


@DEVICES
def test_a_module_that_the_caller_holds(device):
    """The demo's weights in models.DiT, wrapped, compiled, and in half: the same as by
    name. They are copied.
    """
    from accel.checkpoints.loading import find_model

    model = DiT_models["DiT-Demo/2"]()
    model.load_state_dict(find_model(DEMO / "dit.safetensors"))
    with demo(device) as sampler:
        want = sampler.latents([1, 2])
    vae = str(DEMO / "vae")
    for module in (model.to(device), AveragedModel(model), torch.compile(model)):
        with Sampler(module, vae=vae, device=device, num_sampling_steps=4) as sampler:
            for value in model.parameters():
                value.data.add_(1)
            got = sampler.latents([1, 2])
            assert torch.equal(got, want) and not got.is_inference()
        model.load_state_dict(find_model(DEMO / "dit.safetensors"))


def test_a_class_of_the_callers_own(capsys):
    """The state dict and num_heads suffice. Any size works; a size that it was not
    trained at is printed.
    """
    model = fill(
        DiT(
            input_size=8,
            patch_size=4,
            hidden_size=48,
            depth=2,
            num_heads=3,
            mlp_ratio=8 / 3,
            num_classes=5,
        )
    )
    how = dict(output_type="latent", device="cpu", num_sampling_steps=3)
    with Sampler(model, **how) as ours, Sampler(Original(copy.deepcopy(model)), **how) as other:
        assert ours.latents([4]).shape == (1, 4, 8, 8) and torch.equal(
            ours.latents([4]), other.latents([4])
        )
    assert "trained at" not in capsys.readouterr().out
    with Sampler(model, image_size=128, **how) as larger:
        assert larger.latents(range(5)).shape == (5, 4, 16, 16)
    assert "DiT: weights trained at 64 px, sampling at 128 px" in capsys.readouterr().out


NOTICES = """
import logging, sys
from accel import Sampler
from accel.families.dit.network import DiT
def sample():
    model = DiT(input_size=8, hidden_size=48, depth=1, num_heads=2)
    model.final_layer.linear.reset_parameters()
    Sampler(model, image_size=128, device="cpu", output_type="latent")
sample()
logger = logging.getLogger("accel")
logger.setLevel(logging.ERROR)
sample()
logger.setLevel(logging.WARNING)
logging.basicConfig(stream=sys.stdout, format="%(levelname)s of %(name)s: %(message)s")
sample()
"""


def test_notices_are_of_pythons_logging():
    """Shown without a handler, silent above their level, and formatted by the caller's."""
    done = forks.run(["-c", NOTICES], OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    line = "DiT: weights trained at 64 px, sampling at 128 px\n"
    assert (done.returncode, done.stderr) == (0, line)
    assert re.fullmatch(r"WARNING of accel\.\w+: " + line, done.stdout), done.stdout


def test_a_class_that_names_no_family_is_taken_for_a_dit_aloud(capsys):
    """Without sigma a flow has a DiT's entries and function: its class alone says that it
    is one.
    """
    how = dict(output_type="latent", device="cpu", num_sampling_steps=3)
    for kind, sampler, words in (
        (Original, "ddpm", "Original: names no family, taken for a DiT (noise)"),
        (type("MySiT", (Original,), {}), "sde", "MySiT: names no family, taken for a SiT (vel"),
        (type("MySiT", (Original,), {"learn_sigma": False}), "sde", ""),
        (DiT, "ddpm", ""),
    ):
        model = small(learn_sigma=False)
        with Sampler(model if kind is DiT else kind(model), **how) as made:
            assert made.run.settings.sampler == sampler and words in (
                out := capsys.readouterr().out
            )
            assert bool(words) == ("taken for a" in out)


def test_a_position_table_that_was_trained_serves_its_own_size():
    model = small()
    how = dict(output_type="latent", device="cpu", num_sampling_steps=3)
    model.pos_embed.data += 0.1
    with Sampler(model, **how) as sampler:
        assert torch.allclose(sampler.latents([4]), upstream(model, (4,), 0, 3), atol=1e-4)
    with mistake("", "DiT", "0.1"):
        Sampler(model, image_size=128, **how)


def test_close_frees_the_network():
    sampler = demo()
    sampler.sample(0)
    network = weakref.ref(sampler._pipeline.network)
    sampler.close()
    sampler.close()
    gc.collect()
    assert network() is None
    for call in (sampler.sample, sampler.latents):
        with pytest.raises(ValueError):
            call(0)


def test_a_loaded_sampler_reads_no_file(tmp_path, monkeypatch):
    """Its configuration, weights, guide and decoder may move, and the process may go elsewhere."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    config = write_rae(folder)().name
    how = dict(labels=[1, 5], cfg_scale=1.3)
    with Sampler(config=config, device="cpu") as sampler:
        want = sampler.sample(**how)
        Path(config).write_text("no: YAML of ours")
        assert sampler.sample(**how) == want
        folder.rename(tmp_path / "elsewhere")
        monkeypatch.chdir(tmp_path)
        assert sampler.sample(**how) == want
    with Sampler("DiT-Demo/2", vae=elsewhere(DEMO / "vae", tmp_path), device="cpu") as sampler:
        (tmp_path / "vae").rename(tmp_path / "moved")  # before the first picture
        assert len(sampler.sample(1, num_sampling_steps=2)) == 1


def elsewhere(folder, place):
    return shutil.copytree(folder, place / folder.name)


def test_a_notice_names_the_parameter(tmp_path, caplog):
    """A command's line has its flag: tests/checkpoints/test_recognise.py."""
    torch.save({"ema": small(learn_sigma=False).state_dict()}, tmp_path / "own.pt")
    with Sampler(tmp_path / "own.pt", num_heads=2, **LATENT):
        assert "if it is not: model=" in caplog.text and "--" not in caplog.text


@pytest.mark.parametrize(
    "make, parameter, name",
    [
        (lambda: Sampler(""), "ckpt", "empty"),
        (lambda: Sampler("x" * 300), "model", "DiT-XL/2"),
        (lambda: Sampler("weights.pt"), "ckpt", "weights.pt"),
        (lambda: pickle.dumps(demo()), "", "pickled"),
        (lambda: demo(vae=nn.Linear(2, 2)), "vae", "Linear"),
        (lambda: demo(vae=AutoencoderKL().to("meta")), "vae", "AutoencoderKL"),
        (lambda: demo().latents(0, num_sampling_steps=0), "num_sampling_steps", "0"),
        (lambda: demo().latents([]), "labels", "at least one"),
        (lambda: demo(num_sampling_steps=10.0), "num_sampling_steps", "10.0"),
        (lambda: demo(image_size="64"), "image_size", "'64'"),
        (lambda: demo(cfg_scale="abc"), "cfg_scale", "'abc'"),
        (lambda: demo(seed=1.0), "seed", "1.0"),
        (lambda: demo(ckpt=5), "ckpt", "5"),
        (lambda: demo(labels=5), "labels", "list"),
        (lambda: demo(guidance_interval=0.5), "guidance_interval", "0.5"),
        (lambda: demo().latents([1.0]), "labels", "1.0"),
        (lambda: demo().latents([True]), "labels", "True"),
        (lambda: demo().latents([1], seed=[1.0]), "seed", "1.0"),
        (lambda: demo().latents([1], noise="z"), "noise", "array"),
        (lambda: demo().latents([1, 2], seed=[1]), "seed", "labels"),
        (lambda: demo().latents([1], seed=[2**70]), "seed", str(2**70)),
        (lambda: demo().latents([1], seed=2**70), "seed", str(2**70)),
        (lambda: demo().latents(1, noise=Z), "noise", "(1, 4, 16, 16"),
        (lambda: demo().latents([1, 2], noise=Z.long()), "noise", "torch.int64"),
        (lambda: demo().latents([1, 2], noise=Z / 0), "noise", "finite"),
        (lambda: demo().decode(Z[0]), "latents", "(n, 4, side, side)"),
        (lambda: demo(output_type="latent").decode(Z), "output_type", "decoder"),
        (lambda: demo(output_type="latent").sample(0), "output_type", "decoder"),
        (lambda: demo().refresh("x.pt"), "", "str"),
        (lambda: demo().refresh([]), "", "list"),
        (lambda: demo().refresh({}), "", "pos_embed"),
        (lambda: demo().refresh(small().state_dict()), "", "216"),
        (lambda: demo().latents(1, noise=Z.clone().requires_grad_()), "", "gradients"),
        (lambda: Sampler(DiT(hidden_size=48, depth=1, num_heads=2, in_channels=3)), "", "vae=ema"),
        (lambda: Sampler(DiT(hidden_size=48, depth=1, num_heads=2), ckpt="x.pt"), "ckpt", "disk"),
    ],
)
def test_errors_are_value_errors_of_one_line(make, parameter, name):
    with mistake(parameter, name) as caught:
        make()
    assert isinstance(caught.value, ValueError)


def with_nan(model):
    fill(model).blocks[0].mlp.fc1.bias.data[3] = nan
    return model


@pytest.mark.parametrize(
    "precision, device", [("fp32", "cpu"), pytest.param("fp16", "cuda", marks=pytest.mark.gpu)]
)
def test_weights_are_renewed_in_place(precision, device):
    """To the bit as a new Sampler."""
    how = dict(precision=precision, device=device, output_type="latent", num_sampling_steps=3)
    build = DiT_models["DiT-Demo/2"]
    model = fill(build())
    ema = fill(build(), seed=3)
    with Sampler(model, **how) as sampler, Sampler(ema, **how) as new:
        before = sampler.latents([1, 2])
        sampler.refresh(AveragedModel(ema))
        assert torch.equal(sampler.latents([1, 2]), new.latents([1, 2]))
        assert not torch.equal(sampler.latents([1, 2]), before)
        for other, name in (
            (fill(build(num_heads=2)), "num_heads 2"),
            (fill(build(num_classes=9, class_dropout_prob=0)), "num_classes 9"),
            (fill(FourChannels(**build.config)), "guidance_channels=4"),
            (fill(Otherwise(**build.config)), "Otherwise"),
            (build().to("meta"), "no values"),
            (with_nan(build()), "blocks.0.mlp.fc1.bias"),
            (nn.Linear(2, 2), "Linear"),
        ):
            with mistake("", name):
                sampler.refresh(other)
        assert torch.equal(sampler.latents([1, 2]), new.latents([1, 2]))


def test_a_refresh_without_check_ignores_the_guidance_of_a_module():
    build = DiT_models["DiT-Demo/2"]
    other = fill(FourChannels(**build.config), seed=3)
    how = dict(device="cpu", output_type="latent", num_sampling_steps=3, check=False)
    with Sampler(fill(build()), **how) as sampler, Sampler(other, **how) as new:
        sampler.refresh(other)
        assert torch.equal(sampler.latents([1, 2]), new.latents([1, 2]))


@DEVICES
@pytest.mark.parametrize(
    "how",
    [dict(sampler="ddpm"), dict(sampler="unipc"), dict(model="SiT-Demo/2", sampler="sde")],
    ids=lambda how: how["sampler"],
)
def test_a_seed_for_each_picture(device, how):
    """Each picture is that of its seed sampled by itself: to the bit one at a time, and but for
    rounding all at once. The steps of a SiT draw from the CPU's generator.
    """
    labels, seeds = [1, 2, 1, 3], [5, 6, 5, 0]
    with demo(device, **how, output_type="latent", batch_size=1) as one_at_a_time:
        alone = [one_at_a_time.latents(*each) for each in zip(labels, seeds)]
        got = one_at_a_time.latents(labels, seed=torch.tensor(seeds))
    assert torch.equal(got, torch.cat(alone))
    with demo(device, **how, output_type="latent") as sampler:
        together = sampler.latents(labels, seed=seeds)
    assert torch.allclose(together, got, atol=1e-3 if device == "cpu" else 0.3)


@DEVICES
def test_noise_of_the_callers_own(device):
    """The noise replaces z alone: with the z of a seed the latents are that seed's."""
    z = torch.randn(2, 4, 16, 16, generator=torch.Generator(device).manual_seed(7), device=device)
    with demo(device, output_type="latent") as sampler:
        want = sampler.latents([1, 2], seed=7)
        before = z.clone()
        for noise in (z, z.double(), z.cpu().numpy()):
            assert torch.equal(sampler.latents([1, 2], seed=7, noise=noise), want)
            assert not torch.equal(sampler.latents([1, 2], seed=8, noise=noise), want)
        assert torch.equal(z, before)
        first = sampler.latents([1, 2], seed=8, noise=z.flip(0))
        assert torch.equal(sampler.latents([1, 2], seed=8, noise=z.flip(0)), first)
        assert not torch.equal(sampler.latents([1, 2], seed=8), first)
    with demo(device, sampler="ddim", output_type="latent") as sampler:  # z alone decides
        pair = [sampler.latents([1, 2], seed, noise=z) for seed in (1, 2)]
        assert torch.equal(*pair)


@DEVICES
def test_latents_are_decoded(device):
    with demo(device) as sampler:
        latents = sampler.latents([1, 5], seed=3)
        want = [np.asarray(picture) for picture in sampler.sample([1, 5], seed=3)]
        for given in (latents, latents.cpu().numpy()):
            pictures = [np.asarray(picture) for picture in sampler.decode(given)]
            assert all(map(np.array_equal, pictures, want)) and len(pictures) == 2
        assert sampler.decode(latents[:0]) == []


def test_a_state_dict_renews_the_weights():
    """Of a Sampler of a file, of a module, and of a module of diffusers."""
    build = DiT_models["DiT-Demo/2"]
    how = dict(device="cpu", output_type="latent", num_sampling_steps=3)
    cases = [
        ("DiT-Demo/2", fill(build(), seed=3)),
        (fill(build()), fill(build(), seed=3)),
        (transformer(), transformer(seed=3)),
    ]
    for first, ema in cases:
        with Sampler(first, **how) as sampler, Sampler(ema, **how) as new:
            before = sampler.latents([1, 2])
            state = ema.state_dict()
            sampler.refresh(state)
            want = new.latents([1, 2])
            assert torch.equal(sampler.latents([1, 2]), want) and not torch.equal(want, before)
            sampler.refresh(first if isinstance(first, torch.nn.Module) else DiT_models[first]())
            sampler.refresh({f"module.{name}": value for name, value in state.items()})
            assert torch.equal(sampler.latents([1, 2]), want)
            for wrong in (dict(list(state.items())[:-1]), {k: v * nan for k, v in state.items()}):
                with pytest.raises(UsageError):
                    sampler.refresh(wrong)
            assert torch.equal(sampler.latents([1, 2]), want)


@DEVICES
def test_threads_get_their_own_pictures(device):
    """Two Samplers, of two tiers where there are two, and four threads on one of them. None leaves
    another's default dtype.
    """
    how = dict(output_type="latent", num_sampling_steps=5)
    second = "fp16" if device == "cuda" else "fp32"
    with demo(device, precision="fp32", **how) as a, demo(device, precision=second, **how) as b:
        works = [
            lambda: a.latents([1, 2], seed=1),
            lambda: b.latents([3], seed=2, cfg_scale=2.0),
            lambda: a.latents([4], seed=3, num_sampling_steps=4),
            lambda: a.latents([1, 2], seed=4, cfg_scale=1.5),
            lambda: a.latents([0], seed=5),
        ]
        want = [work() for work in works]
        try:
            torch.set_default_dtype(torch.float64)
            with ThreadPoolExecutor(len(works)) as pool:
                for _ in range(3):
                    found = [pool.submit(work) for work in works]
                    assert all(map(torch.equal, [one.result() for one in found], want))
            assert torch.get_default_dtype() == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


@DEVICES
def test_the_callers_modes_change_nothing_and_are_left_alone(device):
    """Default dtype and device, autocast, inference mode; generators and backend switches."""

    def trace():
        switches = [switch.fp32_precision for switch in SWITCHES]
        gpu = torch.cuda.get_rng_state().tolist() if device == "cuda" else None
        return switches, gpu, torch.get_rng_state().tolist()

    before = trace()
    with demo(device, output_type="latent") as sampler:
        want = sampler.latents([1, 2])
        default = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float64)
            torch.set_default_device("meta")
            for mode in (lambda: torch.autocast(device, torch.bfloat16), torch.inference_mode):
                with mode(), demo(device, output_type="latent") as inside:
                    got = sampler.latents([1, 2]), inside.latents([1, 2])
                assert all(torch.equal(one, want) and not one.is_inference() for one in got)
        finally:
            torch.set_default_dtype(default)
            torch.set_default_device(None)
    assert trace() == before


@DEVICES
def test_a_pipeline_of_diffusers(device, tiny_vae):
    """Its transformer, which tests/test_accelerate.py compares with the copy."""
    pipe = pipeline(tiny_vae)
    how = dict(device=device, precision="fp32", num_sampling_steps=3)
    found = []
    for given in (dict(model=pipe), dict(model=pipe.transformer, vae=pipe.vae)):
        with Sampler(**given, **how) as sampler:
            latents = sampler.latents([207, 3], seed=1)
            found.append((latents.tolist(), sampler.sample([207, 3], seed=1)))
    assert found[0] == found[1]
    guided = accelerate(pipe.transformer.to(device), "fp32").forward_with_cfg
    torch.manual_seed(1)
    z = torch.randn(2, 4, 8, 8, device=device).repeat(2, 1, 1, 1)
    y = torch.tensor([207, 3, 1000, 1000], device=device)
    arguments = dict(clip_denoised=False, model_kwargs=dict(y=y, cfg_scale=4.0))
    want = create_diffusion("3").p_sample_loop(guided, z.shape, z, **arguments)[:2]
    assert (latents - want).norm() / want.norm() < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_is_the_only_one_that_is_touched():
    """Of the bar too: no context on GPU 0."""
    code = (
        "import torch\nfrom accel import Sampler\n"
        "with Sampler('DiT-Demo/2', device='cuda:1', num_sampling_steps=5) as s: s.sample([1], progress=True)\n"
        "print(torch._C._cuda_hasPrimaryContext(0), torch._C._cuda_hasPrimaryContext(1))"
    )
    done = forks.run(["-c", code], ROOT)
    assert done.stdout.split()[-2:] == ["False", "True"], done.stdout + done.stderr
