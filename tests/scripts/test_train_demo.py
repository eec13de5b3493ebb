"""The demo: what it draws, that its training runs, and that the committed weights are trained ones."""

import json
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from accel import vae
from accel.engine import Engine
from accel.options import DEMO, SamplingOptions
from models import DiT_models
from scripts import score_demo
from scripts.demo_pictures import CLASSES, SIZE, from_bytes, render, render_all
from scripts.train_demo import reconstruction_psnr, standardise

PSNR_BOUND = 33.0  # dB; the card quotes 34.6 over 512 pictures


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def features(pictures):
    """Colours and edges, coarsely: (N, 3, S, S) in (-1, 1) → (N, 320)."""
    grey = pictures.mean(1, keepdim=True)
    across, down = F.pad(grey.diff(dim=3).abs(), (0, 1)), F.pad(grey.diff(dim=2).abs(), (0, 0, 0, 1))
    return F.avg_pool2d(torch.cat([pictures, 6 * across, 6 * down], 1), 16).flatten(1)


@pytest.fixture(scope="module")
def judge():
    """Kernel ridge regression on 32 drawn pictures a class: pictures (N, 3, S, S) → classes (N,)."""
    pictures, labels = render_all(32, seeded(1))
    known = features(from_bytes(pictures))
    mean, std = known.mean(0), known.std(0) + 1e-3

    def kernel(a, b):
        return torch.exp(-(torch.cdist((a - mean) / std, (b - mean) / std) ** 2) / known.shape[1])

    weights = torch.linalg.solve(
        kernel(known, known) + 0.01 * torch.eye(len(known)), F.one_hot(labels).float() - 1 / len(CLASSES)
    )
    return lambda pictures: (kernel(features(pictures), known) @ weights).argmax(1)


@pytest.fixture(scope="module")
def fresh():
    """Eight pictures a class that nothing has been fitted to."""
    return render_all(8, seeded(2))


def test_pictures_follow_from_the_seed():
    for label in range(len(CLASSES)):
        once, again, other = (render(label, 2, seeded(seed)) for seed in (3, 3, 4))
        assert once.shape == (2, 3, SIZE, SIZE) and once.abs().max() <= 1
        assert torch.equal(once, again)
        assert (once - other).abs().mean() > 0.05 and (
            once[0] - once[1]
        ).abs().mean() > 0.05  # seeds and pictures differ
        assert once.std() > 0.1


def test_classes_can_be_told_apart(judge, fresh):
    pictures, labels = fresh
    assert (judge(from_bytes(pictures)) == labels).float().mean() > 0.95


def test_standardise_leaves_the_pictures_and_gives_unit_latents(fresh):
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    torch.manual_seed(0)
    model = (
        AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            layers_per_block=1,
            block_out_channels=[8, 8, 16, 16],
            norm_num_groups=4,
            latent_channels=4,
        )
        .eval()
        .requires_grad_(False)
    )
    pictures = fresh[0][::4]
    with torch.no_grad():
        before = model.decode(model.encode(from_bytes(pictures)).latent_dist.mean).sample
        standardise(model, pictures)
        latents = model.encode(from_bytes(pictures)).latent_dist
        after = model.decode(latents.mean).sample
    assert (after - before).norm() / before.norm() < 1e-4
    scaled, noise = latents.mean * vae.SCALE, latents.std * vae.SCALE
    assert scaled.mean(dim=(0, 2, 3)).abs().max() < 1e-3
    total = scaled.var(dim=(0, 2, 3), unbiased=False) + noise.square().mean(dim=(0, 2, 3))
    torch.testing.assert_close(total, torch.ones(4), rtol=1e-3, atol=0)


def test_training_and_score_run_end_to_end(run, tmp_path):
    """A few steps: files that load strictly, a network that has moved off its zeros, figures that add up."""
    done = run(
        "scripts/train_demo.py",
        "--device",
        "cpu",
        "--output",
        tmp_path,
        "--pictures",
        1,
        "--vae-steps",
        2,
        "--dit-steps",
        4,
        "--vae-batch",
        2,
        "--dit-batch",
        4,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "training.json").read_text())
    assert (report["vae"]["steps"], report["dit"]["steps"], report["pictures"]) == (2, 4, 8)
    state = load_file(tmp_path / "dit.safetensors")
    DiT_models["DiT-Demo/2"]().load_state_dict(state, strict=True)
    assert state["final_layer.linear.weight"].abs().max() > 0
    decoded = vae.decode(
        vae.load_vae(vae.find_vae(str(tmp_path / "vae")), torch.device("cpu")), torch.randn(1, 4, 16, 16)
    )
    assert decoded.shape == (1, 3, SIZE, SIZE) and decoded.isfinite().all()

    done = run(
        "scripts/score_demo.py",
        "--folder",
        tmp_path,
        "--device",
        "cpu",
        "--count",
        4,
        "--num-sampling-steps",
        2,
        "--fit-pictures",
        1,
        "--fit-steps",
        2,
        "--output",
        tmp_path / "score.json",
        "--grid",
        tmp_path / "grid.png",
    )
    assert done.returncode == 0, done.stderr
    score = json.loads((tmp_path / "score.json").read_text())
    assert (
        score["of"] == 4
        and list(score["by_class"]) == list(CLASSES[:4])
        and (tmp_path / "grid.png").stat().st_size > 1000
    )
    assert score["recognised"] == pytest.approx(sum(score["by_class"].values()) / 4, abs=1e-3)


# ---- the committed weights ----


def test_committed_weights_are_small_and_trained():
    assert sum(file.stat().st_size for file in DEMO.rglob("*.safetensors")) <= 25_000_000
    state = load_file(DEMO / "dit.safetensors")
    model = DiT_models["DiT-Demo/2"]()
    model.load_state_dict(state, strict=True)
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in state.values())
    for block in model.blocks:
        assert block.adaLN_modulation[1].weight.std() > 0.01
        assert all(part.std() > 0.005 for part in block.adaLN_modulation[1].weight.chunk(6))
    assert model.final_layer.linear.weight.std() > 0.01
    assert model.blocks[0].attn.qkv.in_features // model.num_heads == 72  # as in XL


def test_committed_vae_reconstructs_fresh_pictures(fresh):
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    model = AutoencoderKL.from_pretrained(DEMO / "vae", torch_dtype=torch.float32)
    assert model.config.scaling_factor == vae.SCALE
    pictures = fresh[0][::2]
    assert reconstruction_psnr(model, pictures) > PSNR_BOUND
    with torch.no_grad():
        latents = model.encode(from_bytes(pictures)).latent_dist.mean * vae.SCALE
    assert 0.8 < latents.std() < 1.2


def test_committed_model_draws_what_it_is_asked_for(judge):
    """All eight classes in fewer steps than the card's figure is for; at most one may be missed."""
    engine = Engine(SamplingOptions(model="DiT-Demo/2", device="cpu", num_sampling_steps=40).resolve())
    answers = judge(engine.decode(engine.run()).clamp(-1, 1))
    assert (answers == torch.arange(8)).sum() >= 7, answers


def test_committed_figures_meet_the_bar_and_the_card_quotes_them():
    training, score = (json.loads((DEMO / name).read_text()) for name in ("training.json", "score.json"))
    assert score["recognised"] >= 0.95 and score["of"] == 512 and (score["cfg_scale"], score["steps"]) == (4.0, 250)
    assert training["classes"] == list(CLASSES) and training["vae"]["psnr_db"] > PSNR_BOUND
    card = (DEMO / "README.md").read_text()
    figures = [
        f"{100 * score['recognised']:.1f} %",
        f"{training['vae']['psnr_db']} dB",
        training["commit"],
        training["date"],
        str(training["dit"]["loss"]),
        training["torch"],
        training["device"],
        training["command"],
    ]
    for figure in figures + [f"{name} {100 * share:.1f} %" for name, share in score["by_class"].items()]:
        assert figure in card, figure


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_scored(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["score_demo.py", "--grid", "/proc/x.png"])
    with pytest.raises(SystemExit) as stop:
        score_demo.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and "--grid /proc/x.png: cannot write" in error
