"""The demo: what it draws, that its training runs, and that the committed weights are trained ones."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from safetensors.torch import load_file

from accel import door
from accel.latents.decoder import Decoder
from accel.latents.files import find
from accel.request import GridRequest
from pretrained_models.demo import train
from pretrained_models.demo.pictures import CLASSES, SIZE, from_bytes, render, render_all

DEMO = ROOT / "pretrained_models" / "demo"
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

    targets = F.one_hot(labels).float() - 1 / len(CLASSES)
    weights = torch.linalg.solve(kernel(known, known) + 0.01 * torch.eye(len(known)), targets)
    return lambda pictures: (kernel(features(pictures), known) @ weights).argmax(1)


@pytest.fixture(scope="module")
def fresh():
    """Eight pictures a class that nothing has been fitted to."""
    return render_all(8, seeded(2))


# ---- pictures ----


def test_pictures_are_what_the_weights_were_trained_on():
    """Two of each class, averaged over 8×8 pixels, as the first version drew them. Another draw changes everything."""
    golden = np.load(Path(__file__).with_name("golden-pictures.npy")).astype(np.float32)
    drawn = torch.cat([render(label, 2, seeded(5)) for label in range(len(CLASSES))])
    assert drawn.shape == (16, 3, SIZE, SIZE) and drawn.abs().max() <= 1
    assert np.abs(F.avg_pool2d(drawn, 8).numpy() - golden).max() < 2e-3


# ---- training ----


def test_training_and_score_run_end_to_end(here, tmp_path):
    """A few steps: files that load strictly, a network that has moved off its zeros, figures that add up."""

    def program(name, **flags):
        words = [word for flag, value in flags.items() for word in ("--" + flag.replace("_", "-"), value)]
        done = here(f"pretrained_models/demo/{name}.py", "--device", "cpu", *words)
        assert not done.returncode, done.stderr

    def trained(model, **flags):
        more = dict(model=model, vae=tmp_path / "vae", output=tmp_path / "more", pictures=1, dit_steps=2, dit_batch=2)
        program("train", **more, **flags)
        state = load_file(tmp_path / "more" / f"{train.NETWORKS[model][0]}.safetensors")
        train.NETWORKS[model][1]().load_state_dict(state, strict=True)
        return state

    program("train", output=tmp_path, pictures=1, vae_steps=2, dit_steps=4, vae_batch=2, dit_batch=4)
    report = json.loads((tmp_path / "training.json").read_text())
    assert (report["vae"]["steps"], report["dit"]["steps"], report["pictures"]) == (2, 4, 8)
    begun = load_file(tmp_path / "dit.safetensors")
    assert begun["final_layer.linear.weight"].abs().max() > 0
    decoded = Decoder(find(str(tmp_path / "vae")), torch.device("cpu")).decode(torch.randn(1, 4, 16, 16))
    assert decoded.shape == (1, 3, SIZE, SIZE) and decoded.isfinite().all()

    state = trained("Large-DiT-Demo/2", save_dtype="float16")
    assert all(value.dtype == torch.float16 for value in state.values())
    state = trained("SiT-Demo/2", init=tmp_path / "dit.safetensors")
    moved = {name: (state[name] - begun[name]).abs().max() for name in state if state[name].shape == begun[name].shape}
    assert len(moved) == len(begun) - 2 and 0 < max(moved.values()) < 0.01

    weights = dict(ckpt=tmp_path / "dit.safetensors", vae=tmp_path / "vae")
    program("score", count=4, num_sampling_steps=2, fit_pictures=1, fit_steps=2, **weights, output=tmp_path / "s.json")
    figures = json.loads((tmp_path / "s.json").read_text())
    assert figures["recognised"] == pytest.approx(sum(figures["by_class"].values()) / 4, abs=1e-3)


# ---- the committed weights ----


def test_committed_vae_reconstructs_fresh_pictures(fresh):
    model = AutoencoderKL.from_pretrained(DEMO / "vae", torch_dtype=torch.float32)
    assert model.config.scaling_factor == train.SCALE
    pictures = fresh[0][::4]
    assert train.reconstruction_psnr(model, pictures) > PSNR_BOUND
    with torch.no_grad():
        latents = model.encode(from_bytes(pictures)).latent_dist.mean * train.SCALE
    assert 0.8 < latents.std() < 1.2


@pytest.mark.parametrize("model", ("DiT-Demo/2", "SiT-Demo/2"))
def test_committed_model_draws_what_it_is_asked_for(model, judge):
    """All eight classes in fewer steps than the card's figure is for; at most one may be missed."""
    settings, run, decoder = door.ready(GridRequest(model=model, device="cpu", num_sampling_steps=40))
    answers = judge(decoder.decode(door.latents(settings, run)).clamp(-1, 1))
    assert (answers == torch.arange(8)).sum() >= 7, answers


def test_the_card_quotes_the_committed_figures():
    training, figures = (json.loads((DEMO / name).read_text()) for name in ("training.json", "score.json"))
    quoted = [f"{100 * figures['recognised']:.1f} %", f"{training['vae']['psnr_db']} dB", str(training["dit"]["loss"])]
    quoted += [f"{name} {100 * share:.1f} %" for name, share in figures["by_class"].items()]
    card = (DEMO / "README.md").read_text()
    assert [figure for figure in quoted if figure not in card] == []
    assert max(path.stat().st_size for path in DEMO.rglob("*.safetensors")) <= 25_000_000
