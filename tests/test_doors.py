"""Checkpoints of the users' own at every door: the file alone is enough, its pictures are
those of upstream's loop over the module that it was saved from, and what cannot be
sampled is refused in one line.
"""

import argparse
import json
import os
import shutil

import numpy as np
import pytest
import torch
from conftest import fill, mistake
from forks import refused, succeeds
from hub import Hub
from networks import identify, latents_of, ready, to_diffusers, upstream, write_transformer
from safetensors.torch import load_file, save_file

from accel import Sampler
from accel.config.options import Options
from accel.families import constructor_of
from accel.tensors.tensor_files import WEIGHTS
from models import DiT, DiT_models

STEPS = 3
SEED = 5
# name → the model, its constructor's arguments, and how its file is written
OWN = {
    "train.py's, ten classes, 64 px": ("DiT-S/2", dict(input_size=8, num_classes=10), "training"),
    "S/8, five classes, safetensors": (
        "DiT-S/8",
        dict(input_size=16, num_classes=5),
        "safetensors",
    ),
    "S/4, under DistributedDataParallel": (
        "DiT-S/4",
        dict(input_size=16, num_classes=10),
        "module.",
    ),
    "sigma not learned, from Lightning": (
        "DiT-S/4",
        dict(input_size=16, num_classes=10, learn_sigma=False),
        "model.",
    ),
    "Large-DiT, five classes": (
        "Large-DiT-Demo/2",
        dict(input_size=16, num_classes=5),
        "safetensors",
    ),
    "a SiT": ("SiT-S/2", dict(input_size=8, num_classes=10), "training"),
    "no null class": (
        "DiT-S/4",
        dict(input_size=8, num_classes=10, class_dropout_prob=0.0),
        "training",
    ),
}


def save(path, name, model, arguments, kind):
    state = model.state_dict()
    if kind == "training":
        said = dict(
            model=name,
            image_size=8 * arguments["input_size"],
            num_classes=arguments["num_classes"],
            vae="ema",
        )
        if name.startswith("SiT"):
            said |= dict(path_type="Linear", prediction="velocity", sample_eps=1e-3)
        other = {key: value + 1 for key, value in state.items()}
        torch.save(
            {"model": other, "ema": state, "opt": {}, "args": argparse.Namespace(**said)}, path
        )
    elif kind == "safetensors":
        save_file(state, path)
    else:
        torch.save({"state_dict": {kind + key: value for key, value in state.items()}}, path)


@pytest.fixture(scope="module", params=OWN)
def own(request, tmp_path_factory):
    """(file, module, flags that are needed) of a user's checkpoint."""
    name, arguments, kind = OWN[request.param]
    model = fill(constructor_of(name)(**arguments))
    path = tmp_path_factory.mktemp("own") / (
        "own.safetensors" if kind == "safetensors" else "own.pt"
    )
    save(path, name, model, arguments, kind)
    yield path, model, [] if "class_dropout_prob" not in arguments else ["--cfg-scale", "1"]
    path.unlink()


def same(got, want):
    want = want.numpy()
    assert got.shape == want.shape and np.abs(want).max() > 0.1
    return np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


COMMON = ["--device", "cpu", "--num-sampling-steps", STEPS, "--output-type", "latent"]


def test_a_checkpoint_is_enough_for_sample_py(own, tmp_path, here):
    path, model, flags = own
    succeeds(
        here(
            "sample.py",
            "--ckpt",
            path,
            *flags,
            *COMMON,
            "--seed",
            SEED,
            "--output",
            tmp_path / "x.npy",
        )
    )
    labels = range(min(8, model.y_embedder.num_classes))
    assert same(
        np.load(tmp_path / "x.npy"), upstream(model, labels, SEED, STEPS, 1 if flags else 4.0)
    )


@pytest.fixture(scope="module")
def ten():
    """Weights of a DiT-S/4 of ten classes for 64 px."""
    return fill(DiT_models["DiT-S/4"](input_size=8, num_classes=10)).state_dict()


def test_the_matrix_of_refusals(ten, tmp_path, here):
    """What would give wrong pictures in silence, and what says too little: a line each,
    before anything is sampled.
    """
    bare = fill(
        DiT_models["DiT-S/4"](input_size=8, num_classes=10, class_dropout_prob=0.0)
    ).state_dict()
    custom = fill(
        DiT(input_size=8, hidden_size=96, depth=2, num_heads=4, num_classes=10)
    ).state_dict()
    normed = {**ten, "blocks.0.attn.q_norm.weight": torch.ones(64)}
    said = argparse.Namespace
    flow = said(path_type="Linear", prediction="velocity")
    cases = {
        "classes": (ten, None, ["--num-classes", 12], "--num-classes 12: the label table in"),
        "no null class, by its arguments": (
            bare,
            said(num_classes=10),
            [],
            "--cfg-scale 4: guidance needs a null",
        ),
        "no null class, by the flag": (
            bare,
            None,
            ["--num-classes", 10],
            "use --cfg-scale 1, or --num-classes 9 if the last row is the null class",
        ),
        "the null class as a class": (
            ten,
            said(num_classes=10),
            ["--num-classes", 11],
            "has 10 classes, and its label table one more row for no class; drop --num-classes",
        ),
        "arguments of another run": (
            ten,
            said(num_classes=1000),
            [],
            "specifies num_classes 1000, and its label table",
        ),
        "a label": (ten, None, ["--labels", 10], "--labels 10: the model has classes 0 to 9"),
        "another model": (
            ten,
            None,
            ["--model", "DiT-S/2"],
            "contains the weights of DiT-S/4, not of DiT-S/2; use --mod",
        ),
        "a DiT's sampler": (
            ten,
            flow,
            ["--sampler", "ddpm"],
            "--sampler ddpm: is not for a SiT, which SiT-S/4 is; ",
        ),
        "a SiT's sampler": (
            ten,
            None,
            ["--sampler", "sde"],
            "--sampler sde: is not for a DiT, which DiT-S/4 is; use",
        ),
        "one step": (
            ten,
            flow,
            ["--num-sampling-steps", 1],
            "steps 1: must be from 2 to 1000 for --sampler",
        ),
        "a shift of the SDE": (
            ten,
            flow,
            ["--timestep-shift", 0.5],
            "--timestep-shift 0.5: is for euler and heun",
        ),
        "another path": (
            ten,
            said(path_type="GVP"),
            [],
            "trained with path_type GVP, and only Linear is supported",
        ),
        "qk-norm": (
            normed,
            None,
            [],
            "blocks.0.attn.q_norm.weight is not a weight of a DiT and would be ignored",
        ),
        "another width": (
            custom,
            None,
            [],
            "no tensor specifies how many heads it has; give --num-heads",
        ),
    }
    for name, (state, arguments, flags, words) in cases.items():
        path = tmp_path / f"{id(state)} {id(arguments)}.pt"
        if not path.exists():
            torch.save({"ema": state, "args": arguments} if arguments else state, path)
        done = here("sample.py", "--ckpt", path, *COMMON, *flags, "--output", tmp_path / "x.npy")
        assert words in refused(done), name
        assert "side*side" not in done.stderr and not (tmp_path / "x.npy").exists()


def test_a_first_run_names_all_that_is_missing(tmp_path, run):
    """Without weights and without network: network and decoder in one line, and what runs
    without either.
    """
    nowhere = {
        name: "http://127.0.0.1:9"
        for name in ("http_proxy", "https_proxy", "HTTPS_PROXY", "HF_ENDPOINT")
    }
    error = refused(run("sample.py", "--device", "cpu", HF_HUB_CACHE=str(tmp_path), **nowhere))
    words = (
        "--vae stabilityai/sd-vae-ft-ema: not here",
        "--ckpt DiT-XL-2-512x512.pt: download failed",
    )
    assert all(word in error for word in (*words, "facebook/DiT-XL-2-512", "--model DiT-Demo/2")), (
        error
    )


def test_the_file_may_change_once_it_is_loaded(tmp_path, weights):
    """On a CPU the network's weights are a copy of the file's. A file that changes while
    it is read ends the run with a line. The strides of tensors, which a .pt keeps, change
    no bit.
    """
    given = dict(
        model="DiT-Demo/2", device="cpu", labels=(1, 2), num_sampling_steps=2, output_type="latent"
    )
    strided = {
        key: one.T.contiguous().T for key, one in load_file(weights).items() if one.ndim == 2
    }
    wants = []
    for name in ("a.safetensors", "a.pt"):
        path = tmp_path / name
        path.write_bytes(weights.read_bytes()) if name[-1] == "s" else torch.save(
            load_file(weights) | strided, path
        )
        run, pipeline = ready(ckpt=path, **given)
        want = latents_of(run, pipeline)
        wants.append(want)
        size = path.stat().st_size
        with path.open("r+b") as file:  # in place: a mapping would see it
            file.seek(size // 2)
            file.write(os.urandom(size // 2))
        assert torch.equal(latents_of(run, pipeline), want)
        with mistake("ckpt", "changed"):
            run.checkpoint.digest()
        os.truncate(path, 100)  # a mapping would end the process
        assert torch.equal(latents_of(run, pipeline), want)
    assert torch.equal(*wants)


# ---- diffusers ----

NAMES = {
    str(number): name for number, name in enumerate(["tench, Tinca tinca", "goldfish", *"cdefghij"])
}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory, tiny_vae):
    """(folder, module): a DiTPipeline with its own class names and its own decoder, as
    save_pretrained writes one.
    """
    from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel

    module = fill(DiT(input_size=8, hidden_size=96, depth=2, num_heads=4, num_classes=10))
    config = dict(
        num_attention_heads=4,
        attention_head_dim=24,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=10,
    )
    transformer = DiTTransformer2DModel(**config, out_channels=8, norm_eps=1e-6)
    missing, unexpected = transformer.load_state_dict(
        to_diffusers(module.state_dict()), strict=False
    )
    assert not unexpected and not [name for name in missing if "pos_embed" not in name]
    folder = tmp_path_factory.mktemp("pipeline")
    vae = AutoencoderKL.from_pretrained(tiny_vae)
    DiTPipeline(transformer, vae, DDIMScheduler()).save_pretrained(folder)
    index = folder / "model_index.json"  # which has the names on the hub
    index.write_text(json.dumps({**json.loads(index.read_text()), "id2label": NAMES}))
    return folder, module


NO_HEADS = True, "6", 0, 7, 12.0


@pytest.mark.parametrize("part", ["", "transformer"])
def test_a_pipelines_folder_is_enough(part, pipeline, tmp_path, here):
    folder, module = pipeline
    flags = [
        "--device",
        "cpu",
        "--num-sampling-steps",
        STEPS,
        "--seed",
        SEED,
        "--ckpt",
        folder / part,
    ]
    named = ["--labels", "tinca tinca", "goldfish"]
    succeeds(
        here("sample.py", *flags, *named, "--output-type", "latent", "--output", tmp_path / "x.npy")
    )
    assert same(np.load(tmp_path / "x.npy"), upstream(module, (0, 1), SEED, STEPS, 4.0))
    # by its own decoder
    succeeds(here("sample.py", *flags, *named, "--output", f"{tmp_path}/pictures/"))
    assert sorted(file.name for file in (tmp_path / "pictures").iterdir()) == [
        "000-0-tench.png",
        "001-1-goldfish.png",
    ]
    with Sampler(str(folder / part), device="cpu", num_sampling_steps=STEPS) as sampler:
        assert same(
            sampler.latents(("tench", 1), seed=SEED).numpy(),
            upstream(module, (0, 1), SEED, STEPS, 4.0),
        )
        assert sampler.sample("goldfish")[0].size == (64, 64)


def test_a_pipelines_hub_id_is_enough(pipeline, tmp_path, run):
    """Network, decoder and class names are fetched, once."""
    folder, _ = pipeline
    flags = [
        "--device",
        "cpu",
        "--num-sampling-steps",
        STEPS,
        "--ckpt",
        "someone/pipe",
        "--labels",
        "tench",
    ]
    how = dict(HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_DISABLE_PROGRESS_BARS="1")
    with Hub("someone/pipe", folder) as hub:
        succeeds(
            run("sample.py", *flags, "--output", tmp_path / "x.png", HF_ENDPOINT=hub.url, **how)
        )
        parts = [
            f"{part}/{name}" for part in ("transformer", "vae") for name in ("config.json", WEIGHTS)
        ]
        index = "model_index.json", "scheduler/scheduler_config.json"
        assert set(hub.asked) == {*index, *parts} and len(hub.asked) == 6
    # no server now
    succeeds(run("sample.py", *flags, "--output", tmp_path / "y.png", HF_ENDPOINT=hub.url, **how))
    assert (tmp_path / "x.png").read_bytes() == (tmp_path / "y.png").read_bytes()


@pytest.mark.parametrize(
    "change, words",
    [
        (
            dict(num_attention_heads=6, attention_head_dim=36),
            "attention_head_dim is 36, and a DiT with these weights has 16",
        ),
        (dict(norm_eps=0.1), "norm_eps is 0.1, and a DiT with these weights has 1e-05 or 1e-06"),
        (
            dict(activation_fn="geglu"),
            "activation_fn is geglu, and a DiT with these weights has gelu-approximate",
        ),
        (
            dict(attention_bias=False),
            "attention_bias is False, and a DiT with these weights has True",
        ),
        (dict(patch_size=3), "patch_size is 3, and a DiT with these weights has 2"),
        (dict(_class_name="PixArtTransformer2DModel"), "is of a PixArtTransformer2DModel, and in"),
        (dict(num_layers=28), "num_layers is 28, and a DiT with these weights has 2"),
        (
            dict(num_embeds_ada_norm=1000),
            "num_embeds_ada_norm is 1000, and a DiT with these weights has 10",
        ),
        (dict(qk_norm="layer_norm"), "qk_norm layer_norm is unknown"),
        *(
            (dict(num_attention_heads=n, attention_head_dim=None), "num_attention_heads is")
            for n in NO_HEADS
        ),
    ],
)
def test_a_config_that_says_otherwise_is_refused(change, words, pipeline, tmp_path):
    _, module = pipeline
    config = dict(
        _class_name="DiTTransformer2DModel", sample_size=8, patch_size=2, num_attention_heads=4
    )
    config["attention_head_dim"] = 24
    write_transformer(tmp_path, module.state_dict(), config)
    assert identify(tmp_path).num_classes == 10
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with mistake("ckpt", "config.json") as error:
        identify(tmp_path)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change, words",
    [
        (
            dict(prediction_type="v_prediction"),
            "prediction_type v_prediction",
        ),
        (
            dict(beta_schedule="scaled_linear"),
            "beta_schedule scaled_linear",
        ),
        (dict(beta_end=0.012), "beta_end 0.012"),
        (
            dict(rescale_betas_zero_snr=True),
            "rescale_betas_zero_snr True",
        ),
        (
            dict(trained_betas=[0.1] * 1000),
            "its scheduler's trained_betas are not DiT's linear ones",
        ),
    ],
)
def test_a_pipeline_of_another_process_is_refused(
    change, words, pipeline, tmp_path, tiny_vae, here
):
    """Refuse its folder, for sampling and for conversion, and the pipeline in memory."""
    from diffusers import DDIMScheduler, DiTPipeline

    shutil.copytree(pipeline[0], tmp_path / "pipe")
    DDIMScheduler(**change).save_pretrained(tmp_path / "pipe" / "scheduler")
    for command in (
        ("sample.py", *COMMON, "--output", "x.npy"),
        ("scripts/convert_checkpoint.py", "--output", "x.pt"),
    ):
        assert words in refused(here(*command, "--ckpt", tmp_path / "pipe"))
    pipe = DiTPipeline.from_pretrained(tmp_path / "pipe")
    with mistake("", words):
        Sampler(pipe, device="cpu", output_type="latent")
    sampler = Sampler(pipe.transformer, device="cpu", output_type="latent")
    with sampler, mistake("", words):
        sampler.refresh(pipe)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(image_size="x"), "specifies image_size x: must be a whole number; save it"),
        (
            dict(image_size=10**12),
            "specifies image_size 1000000000000: must be from 1 to 8192; save it",
        ),
        (
            dict(num_classes=True),
            "specifies num_classes True: must be a whole number; save it again",
        ),
        (dict(class_names=[1, 2]), "specifies class_names [1, 2], which must be a list of names"),
        (dict(num_heads=7), "specifies 7 heads, which do not divide its width 384"),
        (
            dict(family="Large-DiT"),
            "is not a Large-DiT but a DiT; save it again",
        ),
    ],
)
def test_what_a_file_says_of_itself_is_checked(change, words, ten, tmp_path, here):
    """Arguments of training: tests/checkpoints/test_arguments.py."""
    change = {"family": "DiT", **change}
    torch.save({"ema": ten, "metadata": change}, tmp_path / "x.pt")
    save_file(
        ten,
        tmp_path / "x.safetensors",
        {f"dit.{key}": json.dumps(value) for key, value in change.items()},
    )
    for name in ("x.pt", "x.safetensors"):
        assert words in refused(
            here("sample.py", "--ckpt", tmp_path / name, *COMMON, "--output", tmp_path / "x.npy")
        )


def test_a_table_for_a_huge_picture_is_a_line(ten, tmp_path, here):
    """Its bytes are few: it is one row, expanded."""
    torch.save(
        {**ten, "pos_embed": ten["pos_embed"][:, :1].expand(1, 4096**2, -1)}, tmp_path / "x.pt"
    )
    error = refused(
        here("sample.py", "--ckpt", tmp_path / "x.pt", *COMMON, "--output", tmp_path / "x.npy")
    )
    assert "--image-size 131072: must be from 1 to 8192" in error


def test_the_heads_that_a_config_says_are_computed(ten, tmp_path, here):
    """No tensor holds their number: the same weights with other heads are another network."""
    config = dict(sample_size=8, num_embeds_ada_norm=10, num_attention_heads=12)
    write_transformer(tmp_path, ten, config | dict(attention_head_dim=32))
    flags = [
        *COMMON,
        "--ckpt",
        tmp_path,
        "--seed",
        SEED,
        "--labels",
        1,
        "--output",
        tmp_path / "x.npy",
    ]
    succeeds(here("sample.py", *flags))
    module = DiT_models["DiT-S/4"](input_size=8, num_classes=10, num_heads=12).eval()
    module.load_state_dict(ten)
    assert same(np.load(tmp_path / "x.npy"), upstream(module, (1,), SEED, STEPS, 4.0))


# ---- Python's door ----


def test_numpys_numbers_are_numbers():
    given = dict(seed=np.int64(3), cfg_scale=np.float32(2), labels=[np.int32(1), "ball"])
    assert dict(Options(**given)) == dict(seed=3, cfg_scale=2.0, labels=(1, "ball"))
