"""sample.py as its users meet it: a command. Every run here is a process of its own."""

import os
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, fill
from PIL import Image
from safetensors.torch import save_file

from accel import engine, vae
from accel.options import SamplingOptions, UsageError, check_writable
from diffusion import create_diffusion
from models import DiT, DiT_models

DEMO = ("--model", "DiT-Demo/2", "--device", "cpu")


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "demo.safetensors"
    save_file(fill(DiT_models["DiT-Demo/2"]()).state_dict(), path)
    return path


#################################################################################
#                                    Pictures                                   #
#################################################################################


def test_picture_and_latents_are_the_same_in_two_processes(weights, tiny_vae, tmp_path, run):
    outputs = []
    for name in "ab":
        done = run(
            "sample.py",
            *DEMO,
            "--ckpt",
            weights,
            "--vae",
            tiny_vae,
            "--num-sampling-steps",
            4,
            "--labels",
            1,
            5,
            7,
            0,
            2,
            "--output",
            tmp_path / name / "deep" / "p.png",
        )
        assert done.returncode == 0, done.stderr
        latent = run(
            "sample.py",
            *DEMO,
            "--ckpt",
            weights,
            "--num-sampling-steps",
            4,
            "--labels",
            1,
            5,
            7,
            0,
            2,
            "--output-type",
            "latent",
            "--output",
            tmp_path / name / "l.npy",
        )
        assert latent.returncode == 0, latent.stderr
        assert all(word in done.stdout for word in ("load", "sample", "decode", "save", "total", "5 labels", "fp32"))
        outputs.append(((tmp_path / name / "deep" / "p.png").read_bytes(), np.load(tmp_path / name / "l.npy")))
    (picture, latents), (again, latents_again) = outputs
    assert picture == again and np.array_equal(latents, latents_again)
    assert latents.dtype == np.float32 and latents.shape == (5, 4, 16, 16)
    image = Image.open(tmp_path / "a" / "deep" / "p.png")
    assert image.mode == "RGB" and image.size == (4 * 130 + 2, 2 * 130 + 2) and np.asarray(image).std() > 1


def test_equals_the_loop_that_people_write(weights, tmp_path, run):
    """The usual script (seed, z, twice z, p_sample_loop over forward_with_cfg, first half) gives sample.py's latents, bit for bit."""
    done = run(
        "sample.py",
        *DEMO,
        "--ckpt",
        weights,
        "--num-sampling-steps",
        6,
        "--seed",
        3,
        "--cfg-scale",
        2.5,
        "--output-type",
        "latent",
        "--output",
        tmp_path / "l.npy",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    script = f"""
import torch, numpy as np
from safetensors.torch import load_file
from diffusion import create_diffusion
from models import DiT_models
model = DiT_models["DiT-Demo/2"](input_size=16, num_classes=8)
model.load_state_dict(load_file({str(weights)!r})); model.eval()
torch.manual_seed(3); torch.set_grad_enabled(False)
diffusion = create_diffusion("6")
z = torch.randn(8, 4, 16, 16); y = torch.arange(8)
z = torch.cat([z, z], 0); y = torch.cat([y, torch.tensor([8] * 8)], 0)
out = diffusion.p_sample_loop(model.forward_with_cfg, z.shape, z, clip_denoised=False, model_kwargs=dict(y=y, cfg_scale=2.5), progress=False)
np.save({str(tmp_path / "m.npy")!r}, out.chunk(2)[0].numpy())
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    mine, theirs = np.load(tmp_path / "l.npy"), np.load(tmp_path / "m.npy")
    assert np.abs(mine).max() > 0.1
    assert np.array_equal(mine, theirs)


def test_random_stream_draw_by_draw(monkeypatch):
    """z, then at every step, the last included, one normal of 2n rows; a share of the batch draws it all too."""
    network, diffusion = (
        fill(DiT(input_size=4, hidden_size=72, depth=1, num_heads=1, num_classes=5)),
        create_diffusion("7"),
    )
    torch.manual_seed(11)
    want = [torch.randn(3, 4, 4, 4)] + [torch.randn(6, 4, 4, 4) for _ in range(7)]
    after = torch.get_rng_state()
    labels = torch.tensor([1, 2, 3])
    seen, p_sample = [], diffusion.p_sample
    monkeypatch.setattr(
        diffusion, "p_sample", lambda *a, noise, **k: (seen.append(noise), p_sample(*a, noise=noise, **k))[1]
    )
    z = engine.draw_latents(3, 4, 11, torch.device("cpu"))
    whole = engine.denoise(network, diffusion, z, labels, 4.0, 5)
    assert torch.equal(z, want[0]) and all(torch.equal(a, b[:3]) for a, b in zip(seen, want[1:], strict=True))
    assert torch.equal(torch.get_rng_state(), after)
    part = engine.denoise(
        network, diffusion, engine.draw_latents(3, 4, 11, torch.device("cpu")), labels, 4.0, 5, rows=slice(1, 3)
    )
    assert torch.equal(torch.get_rng_state(), after) and torch.allclose(part, whole[1:], atol=1e-4)
    free = engine.denoise(
        network, diffusion, engine.draw_latents(3, 4, 11, torch.device("cpu")), labels, 1.0, 5, guided=False
    )
    assert not torch.equal(torch.get_rng_state(), after) and free.shape == whole.shape  # n rows a step without guidance


def test_repeats_time_the_same_picture(weights, tmp_path, run):
    results = []
    for repeats in (1, 3):
        done = run(
            "sample.py",
            *DEMO,
            "--ckpt",
            weights,
            "--num-sampling-steps",
            3,
            "--repeats",
            repeats,
            "--output-type",
            "latent",
            "--output",
            tmp_path / "l.npy",
            "--labels",
            4,
        )
        assert done.returncode == 0 and "· 1 label ·" in done.stdout, done.stderr
        results.append(np.load(tmp_path / "l.npy"))
    assert (
        "median" in done.stdout and "3 runs after warm-up" in done.stdout and "warm-up" in done.stdout.splitlines()[-1]
    )
    assert np.array_equal(*results)


def test_training_checkpoint_and_other_sizes(weights, tmp_path, run):
    from safetensors.torch import load_file

    torch.save({"model": {}, "ema": load_file(weights), "opt": {}}, tmp_path / "train.pt")
    done = run(
        "sample.py",
        *DEMO,
        "--ckpt",
        tmp_path / "train.pt",
        "--image-size",
        192,
        "--num-sampling-steps",
        2,
        "--output-type",
        "latent",
        "--output",
        tmp_path / "l.npy",
    )
    assert done.returncode == 0, done.stderr
    assert np.load(tmp_path / "l.npy").shape == (8, 4, 24, 24) and "trained at 128 px" in done.stdout


def test_loading_xl_costs_its_file(tmp_path, run):
    """Peak memory of loading 675M parameters from a .pt is at most 1.2 times the file, the interpreter and torch aside."""
    path = tmp_path / "xl.pt"
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in DiT_models["DiT-XL/2"](input_size=64).state_dict().items()}
    torch.save({name: torch.full(shape, 0.01) for name, shape in shapes.items()}, path)
    code = (
        "import resource, sys, torch; from accel import engine; from accel.options import SamplingOptions\n"
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"model = engine.load_model(SamplingOptions(ckpt={str(path)!r}).resolve(), torch.device('cpu'))\n"
        "total = sum(p.sum().item() for p in model.parameters())\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) * 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert path.stat().st_size > 2.6e9
    assert int(done.stdout) < 1.2 * path.stat().st_size
    path.unlink()


#################################################################################
#                                   Bad input                                   #
#################################################################################

BAD = {
    "unknown model": (["--model", "DiT-XXL/2"], "--model DiT-XXL/2", "DiT-XL/2"),
    "label too large": (["--labels", 3, 8], "--labels 8", "0 to 7"),
    "label negative": (["--labels", -1], "--labels -1", "0 to 7"),
    "size": (["--image-size", 250], "--image-size 250", "multiple of 16"),
    "size zero": (["--image-size", 0], "--image-size 0", "multiple of 16"),
    "two checkpoints": (["--ckpt", "a.pt", "--ckpt", "b.pt"], "--ckpt b.pt", "conflicts with --ckpt a.pt"),
    "missing": (["--ckpt", "no/such.pt"], "--ckpt no/such.pt", "no such file"),
    "no vae": (["--vae", "no/vae"], "--vae no/vae", "folder"),
    "cfg": (["--cfg-scale", 0.5], "--cfg-scale 0.5", "at least 1"),
    "cfg nan": (["--cfg-scale", "nan"], "--cfg-scale nan", "at least 1"),
    "no steps": (["--num-sampling-steps", 0], "--num-sampling-steps 0", "1 to 1000"),
    "steps": (["--num-sampling-steps", 1001], "--num-sampling-steps 1001", "1 to 1000"),
    "seed": (["--seed", 2**64], f"--seed {2**64}", "64 bits"),
    "repeats": (["--repeats", 0], "--repeats", "at least 1"),
    "suffix": (["--output", "x.jpg"], "--output x.jpg", ".png"),
    "output": (["--output", "/proc/nowhere/x.png"], "--output /proc/nowhere/x.png", "cannot write"),
    "folder": (["--output", "."], "--output .", ".png"),
    "device": (["--device", "gpu7"], "--device gpu7", "cpu"),
    "other device": (["--device", "xpu"], "--device xpu", "cpu"),
    "tf32": (["--precision", "tf32"], "--precision tf32", "fp32"),
    "precision": (["--precision", "fp8"], "--precision", "fp32"),
    "typo": (["--lables", 3], "--lables", "unrecognized"),
    "classes": (["--num-classes", 5, "--labels", 1], "--num-classes 5", "8"),
    "other model": (
        ["--model", "DiT-S/2", "--num-classes", 8, "--labels", 1, "--image-size", 128],
        "--ckpt",
        "--model DiT-Demo/2",
    ),
    "unpublished": (["--model", "DiT-B/4", "--output-type", "latent"], "--ckpt", "give a file"),
}
if not torch.cuda.is_available():
    BAD["no gpu"] = ["--device", "cuda"], "--device cuda", "--device cpu"


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_status_2(case, weights, tiny_vae, tmp_path, run):
    args, *words = BAD[case]
    base = {"--model": "DiT-Demo/2", "--ckpt": weights, "--vae": tiny_vae, "--device": "cpu"}
    base = [
        part
        for name, value in base.items()
        if name not in args and not (case == "unpublished" and name == "--ckpt")
        for part in (name, value)
    ]
    done = run("sample.py", *base, *args, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and all(word in done.stderr for word in words), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_bad_weights_are_found_before_a_model_is_built(weights, monkeypatch):
    monkeypatch.setattr(DiT, "load_state_dict", lambda *a, **k: pytest.fail("loaded"))
    options = SamplingOptions(model="DiT-S/4", ckpt=str(weights), num_classes=8, labels=(1,), image_size=128).resolve()
    with pytest.raises(UsageError, match="holds the weights of DiT-Demo/2, not of DiT-S/4"):
        engine.load_model(options, torch.device("cpu"))


@pytest.mark.parametrize(
    "wrong, words",
    [
        (dict(model="DiT-XL/3"), "--model DiT-XL/3: unknown"),
        (dict(ckpt="no/such.pt"), "--ckpt no/such.pt"),
        (dict(precision="exact"), "--precision exact"),
        (dict(vae_precision="fp16"), "--vae-precision fp16"),
        (dict(model="DiT-S/8", image_size=144), "--image-size 144"),
    ],
)
def test_what_flags_decide_comes_before_weights_that_are_fetched(wrong, words, weights, monkeypatch):
    for fetch in ("accel.vae.fetch_from_hub", "accel.checkpoint.fetch_from_hub", "accel.checkpoint._download"):
        monkeypatch.setattr(fetch, lambda *_: pytest.fail("fetched"))
    monkeypatch.setattr(vae, "FOLDER", weights.parent)  # where no decoder lies
    with pytest.raises(UsageError, match=words):
        engine.Engine(
            SamplingOptions(
                **{**dict(model="DiT-Demo/2", ckpt=str(weights), vae="ema", device="cpu"), **wrong}
            ).resolve()
        )


@pytest.mark.parametrize("kind", ["image", "latent"])
def test_a_disk_that_is_full_is_a_line(kind, weights, tmp_path):
    """Here a limit on the size of files."""
    output = tmp_path / ("x.png" if kind == "image" else "x.npy")
    run = engine.Engine(
        SamplingOptions(
            model="DiT-Demo/2", ckpt=str(weights), device="cpu", output_type=kind, output=str(output)
        ).resolve()
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(UsageError, match=f"--output {output}: cannot be written .*free some space"):
            run.save(torch.randn(8, 4, 16, 16), torch.randn(8, 3, 128, 128))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_file_is_not_written_over(tmp_path):
    """Root that writes to /dev/null would put a file in its place."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="--json .*pipe: is a folder, a device or a pipe"):
        check_writable(tmp_path / "pipe", "--json")


def test_weights_that_fit_nothing(tmp_path):
    torch.save({"blocks.0.x": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match="fits none of DiT-XL/2"):
        engine.load_model(SamplingOptions(ckpt=str(tmp_path / "x.pt")).resolve(), torch.device("cpu"))


def test_not_finite_latents_are_no_picture(tmp_path, tiny_vae, run):
    state = fill(DiT_models["DiT-Demo/2"]()).state_dict()
    state["final_layer.linear.bias"][0] = float("inf")
    save_file(state, tmp_path / "bad.safetensors")
    done = run(
        "sample.py",
        *DEMO,
        "--ckpt",
        tmp_path / "bad.safetensors",
        "--vae",
        tiny_vae,
        "--num-sampling-steps",
        2,
        "--output",
        tmp_path / "x.png",
    )
    assert done.returncode == 2 and "not finite" in done.stderr and not (tmp_path / "x.png").exists()


def test_ctrl_c_leaves_nothing(weights, tiny_vae, tmp_path):
    process = subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "sample.py"),
            *DEMO,
            "--ckpt",
            str(weights),
            "--vae",
            str(tiny_vae),
            "--num-sampling-steps",
            "1000",
            "--output",
            str(tmp_path / "x.png"),
        ],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # ignored by what a shell starts with &
    time.sleep(6)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130 and "interrupted" in error and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


#################################################################################
#                                   On a GPU                                    #
#################################################################################


@pytest.fixture(scope="session")
def xl(tmp_path_factory):
    """Random non-zero DiT-XL/2 weights for 512 px in training layout, and a VAE of sd-vae-ft-ema's architecture."""
    from diffusers import AutoencoderKL

    folder = tmp_path_factory.mktemp("xl")
    with torch.device("cuda"):
        model = DiT_models["DiT-XL/2"](input_size=64)
        torch.manual_seed(0)
        for name, value in model.named_parameters():
            if name != "pos_embed":
                value.data.normal_(0, 0.02)
        vae = AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            layers_per_block=2,
            block_out_channels=[128, 256, 512, 512],
            latent_channels=4,
            norm_num_groups=32,
            sample_size=256,
        )
    torch.save({"ema": {name: value.cpu() for name, value in model.state_dict().items()}}, folder / "xl.pt")
    vae.save_pretrained(folder / "vae")
    return folder


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_xl_at_512_on_a_gpu(xl, tmp_path, run, precision):
    done = run(
        "sample.py",
        "--image-size",
        512,
        "--ckpt",
        xl / "xl.pt",
        "--vae",
        xl / "vae",
        "--precision",
        precision,
        "--num-sampling-steps",
        25,
        "--output",
        tmp_path / "x.png",
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    assert (
        Image.open(tmp_path / "x.png").size == (4 * 514 + 2, 2 * 514 + 2)
        and np.asarray(Image.open(tmp_path / "x.png")).std() > 1
    )


@pytest.mark.gpu
def test_no_copy_and_no_wait_in_the_loop_on_a_gpu():
    """The loop that people write, and ours: after the first step nothing waits for the device and nothing is uploaded."""
    device = torch.device("cuda")
    network = fill(DiT(input_size=8, hidden_size=144, depth=2, num_heads=2, num_classes=10)).to(device)
    diffusion, labels = create_diffusion("10"), torch.arange(4, device=device)
    for loop in (
        lambda: engine.denoise(network, diffusion, engine.draw_latents(4, 8, 0, device), labels, 4.0, 10),
        lambda: engine.denoise(network, diffusion, engine.draw_latents(4, 8, 0, device), labels, 1.0, 10, guided=False),
    ):
        loop()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
            ) as profile:
                loop()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        copies = [event.name for event in profile.events() if "HtoD" in event.name or "DtoH" in event.name]
        assert copies == []
