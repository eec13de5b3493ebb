import argparse

import numpy as np
import pytest
import torch
from conftest import fill
from forks import refused, succeeds
from safetensors.torch import save_file
from unprivileged import limited

from accel.diffusion import create_diffusion
from accel.families import DEMO, constructor_of
from accel.families.dit.network import DiT_models
from accel.weights.diffusers_layout import to_diffusers
from download import find_model

CONVERT = "scripts/convert_checkpoint.py"


def test_round_trip_through_all_three(weights, tmp_path, here):
    want = find_model(weights)
    at = weights
    for name in ("a", "b.pt", "c", "d.safetensors"):
        text = succeeds(here(CONVERT, "--ckpt", at, "--output", tmp_path / name))
        assert f"{len(want)} tensors" in text and "read back equal" in text
        at = tmp_path / name
    got = find_model(at)
    assert got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in want)


TRAINED = {  # arguments of training
    "SiT-S/8": dict(
        model="SiT-S/8", path_type="Linear", prediction="velocity", num_classes=1000, image_size=128
    ),
    "REPA-SiT-S/8": dict(
        model="SiT-S/8", path_type="linear", prediction="v", num_classes=1000, enc_type="dinov2"
    ),
    "DiT-S/8": dict(model="DiT-S/8", num_classes=1000, image_size=128, vae="mse"),
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_training_file_keeps_its_kind(name, tmp_path, here):
    """Through both files and back, with no flag: the same latents, of the original file
    and of each conversion.
    """
    state = fill(constructor_of(name)(input_size=16, learn_sigma="SiT" not in name)).state_dict()
    extra = {"projectors.0.0.weight": torch.ones(2, 2)} if "REPA" in name else {}
    content = {
        "model": {},
        "ema": {**state, **extra},
        "opt": {},
        "args": argparse.Namespace(**TRAINED[name]),
    }
    torch.save(content, tmp_path / "0.pt")
    flags = [
        "--labels",
        3,
        980,
        "--num-sampling-steps",
        4,
        "--device",
        "cpu",
        "--output-type",
        "latent",
    ]
    found = []
    for number, target in enumerate((None, "1.safetensors", "2.pt", "3.safetensors")):
        ckpt = tmp_path / (target or "0.pt")
        if target:
            source = tmp_path / (f"{number - 1}.pt" if number != 2 else "1.safetensors")
            text = succeeds(here(CONVERT, "--ckpt", source, "--output", ckpt))
            assert f"{name}, {len(state)} tensors" in text
            assert ("left out 1 entries that only training needs" in text) == bool(
                extra and number == 1
            )
        text = succeeds(here("sample.py", "--ckpt", ckpt, *flags, "--output", tmp_path / "x.npy"))
        assert text.startswith(f"{name} · 128 px") and "names no family" not in text
        found.append(np.load(tmp_path / "x.npy"))
    assert all(np.array_equal(one, found[0]) for one in found[1:]) and abs(found[0]).max() > 0.1
    facts = torch.load(tmp_path / "2.pt", weights_only=True)
    assert facts["ema"].keys() == state.keys()
    assert facts["metadata"]["family"] == name.rpartition("-S/8")[0].split("-SiT")[0]
    assert facts["metadata"].get("vae") == TRAINED[name].get("vae")
    done = here(CONVERT, "--ckpt", tmp_path / "2.pt", "--output", tmp_path / "folder")
    assert (
        (done.returncode == 0) == (name == "DiT-S/8") == ("sample with --vae mse" in done.stdout)
    ), done.stderr
    assert (
        name == "DiT-S/8"
        or "; name a .pt or .safetensors file" in done.stderr
        and "diffusers has no" in done.stderr
    )


@pytest.mark.parametrize(
    "off, words", [(1.6e-4, "up to 0.0002 off the sine-cosine table"), (2e-3, None)]
)
def test_the_table_of_a_moving_average(off, words, tmp_path, here):
    """train.py averages the fixed table too, and each step rounds."""
    state = fill(DiT_models["DiT-S/8"](input_size=16)).state_dict()
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(state["pos_embed"].shape, generator=generator).mul_(2 * off).sub_(off)
    noise[0, 0, 0] = off
    torch.save({"ema": {**state, "pos_embed": state["pos_embed"] + noise}}, tmp_path / "x.pt")
    done = here(CONVERT, "--ckpt", tmp_path / "x.pt", "--output", tmp_path / "out")
    if words:
        assert words in succeeds(done)
    else:
        assert "its position table is up to 0.002 off" in refused(done)
        assert not (tmp_path / "out").exists()


def test_diffusers_loads_the_folder(weights, tmp_path, here):
    from diffusers import DiTTransformer2DModel

    succeeds(here(CONVERT, "--ckpt", weights, "--output", tmp_path / "out"))
    theirs = DiTTransformer2DModel.from_pretrained(
        tmp_path / "out", subfolder="transformer", low_cpu_mem_usage=False
    )
    assert (
        theirs.config.num_attention_heads,
        theirs.config.sample_size,
        theirs.config.norm_eps,
    ) == (3, 16, 1e-6)
    for block in theirs.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    model = DiT_models["DiT-Demo/2"]().eval()
    model.load_state_dict(find_model(weights))
    x = torch.randn(2, 4, 16, 16)
    t = torch.tensor([3, 800])
    y = torch.tensor([7, 8])
    with torch.no_grad():
        a = model(x, t, y)
        b = theirs.eval()(x, timestep=t, class_labels=y).sample
    # LayerNorms before the MLP read eps from the config; the rest is rounding
    assert (a - b).norm() / a.norm() < 1e-3


@pytest.mark.parametrize("with_vae", [False, True])
def test_diffusers_loads_the_pipeline(tmp_path, here, with_vae):
    from diffusers import AutoencoderKL, DiTPipeline

    out = tmp_path / "pipeline"
    flags = ["--ckpt", DEMO / "dit.safetensors", "--output", out, "--pipeline"]
    text = succeeds(here(CONVERT, *flags, *(["--vae", DEMO / "vae"] if with_vae else [])))
    assert "DiTPipeline takes 1000 for the null class, and here it is 8" in text
    usual = tmp_path / "usual"
    usual.touch()
    weights = out / "transformer" / "diffusion_pytorch_model.safetensors"
    # as the umask says, and not the owner's alone
    assert weights.stat().st_mode == usual.stat().st_mode
    passed = {} if with_vae else {"vae": AutoencoderKL.from_pretrained(DEMO / "vae")}
    pipeline = DiTPipeline.from_pretrained(out, **passed)
    want = to_diffusers(find_model(DEMO / "dit.safetensors"))
    got = pipeline.transformer.state_dict()
    assert got.keys() == want.keys() and all(
        torch.equal(got[name], want[name].float()) for name in want
    )
    betas = create_diffusion("").betas
    assert torch.allclose(pipeline.scheduler.betas.double(), torch.from_numpy(betas), rtol=1e-6)
    # One label without guidance: the pipeline's null label is ImageNet's.
    images = pipeline([3], guidance_scale=1.0, num_inference_steps=2, output_type="np").images
    assert images.shape == (1, 128, 128, 3) and images.std() > 0.05
    flags = [
        "--model",
        "DiT-Demo/2",
        "--ckpt",
        out,
        "--labels",
        3,
        "--num-sampling-steps",
        1,
        "--device",
        "cpu",
    ]
    succeeds(
        here(
            "sample.py",
            *flags,
            *(["--vae", out] if with_vae else []),
            "--output",
            tmp_path / "x.png",
        )
    )


def test_weights_that_are_not_finite(tmp_path, here):
    state = find_model(DEMO / "dit.safetensors")
    broken = state["blocks.1.mlp.fc1.bias"].clone()
    broken[3] = float("nan")
    save_file({**state, "blocks.1.mlp.fc1.bias": broken}, tmp_path / "a.safetensors")
    command = CONVERT, "--ckpt", tmp_path / "a.safetensors", "--output", tmp_path / "b.pt"
    assert "blocks.1.mlp.fc1.bias holds NaN or infinity" in refused(here(*command))
    assert not (tmp_path / "b.pt").exists()


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bits_are_kept(kind, tmp_path, here):
    state = fill(DiT_models["DiT-S/8"](input_size=16, depth=1)).state_dict()
    state = {name: one.to(kind) if one.ndim == 2 else one for name, one in state.items()}
    torch.save({"ema": state, "args": argparse.Namespace(num_heads=6)}, tmp_path / "0.pt")
    for source, target in (("0.pt", "1.safetensors"), ("1.safetensors", "2.pt")):
        succeeds(here(CONVERT, "--ckpt", tmp_path / source, "--output", tmp_path / target))
    again = find_model(tmp_path / "2.pt")
    assert again.keys() == state.keys()
    assert all(again[name].dtype == one.dtype for name, one in state.items())
    name = "blocks.0.mlp.fc1.weight"
    assert torch.equal(again[name].float(), state[name].float())
    state[name] = torch.full(state[name].shape, float("nan")).to(kind)
    torch.save({"ema": state, "args": argparse.Namespace(num_heads=6)}, tmp_path / "0.pt")
    error = refused(here(CONVERT, "--ckpt", tmp_path / "0.pt", "--output", tmp_path / "3.pt"))
    assert f"{name} holds NaN or infinity" in error


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "x"])
def test_a_disk_that_is_full_is_a_line(weights, name, tmp_path, here):
    """Here a limit on the size of files."""
    with limited("FSIZE", 4096):
        done = here(CONVERT, "--ckpt", weights, "--output", tmp_path / name)
    assert "cannot write there" in refused(done) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "flags, words",
    [
        (("there.pt",), "exists"),
        ((".pt",), "must end in"),
        (("/proc/x.pt",), "cannot write"),
        (("x" * 300,), "File name too long"),
        (("\udcff.pt",), "\\udcff.pt: is not UTF-8"),
        (("\udcff.safetensors",), "is not UTF-8"),
        (("\udcff",), "is not UTF-8"),
        (("x.pt", "--pipeline"), "--pipeline: "),
        (("x", "--vae", "ema"), "--pipeline: "),
    ],
)
def test_bad_input(flags, words, tmp_path, monkeypatch, here):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.pt").touch()
    assert words in refused(here(CONVERT, "--ckpt", DEMO / "dit.safetensors", "--output", *flags))
