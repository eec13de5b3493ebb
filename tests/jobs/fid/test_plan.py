"""From a command's options to a plan, and the settings that are recorded with it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import mistake
from networks import opened, run_of

from accel.config.options import Options
from accel.decoders import LatentSpace
from accel.jobs.fid import job as fid_job
from accel.jobs.fid.job import folder_of, record_of, require_seeds, warn_of_legacy_folder


@pytest.mark.parametrize(
    "name, flags",
    [
        ("DiT-XL-2-pretrained-size-256-vae-ema-cfg-1.5-seed-0", {}),
        (
            "DiT-B-4-b-size-256-vae-d-cfg-1.5-seed-3",
            dict(model="DiT-B/4", ckpt="a/b.pt", vae="c/d", image_size=256, cfg_scale=1.5, seed=3)
            | dict(
                sampler="ddpm", guidance_interval=(0, 1), guidance_channels=3, timestep_shift=1.0
            ),
        ),
        (
            "DiT-XL-2-x_ep14-size-256-vae-ViTXL_n08-cfg-1.5-guide-model-seed-0",
            dict(model="DiT-XL/2", ckpt="DiTs/x_ep14/stage2_model.pt")
            | dict(vae="ViTXL_n08/model.pt", guide="model.pt"),
        ),
        (
            "DiT-XL-2-run7-size-512-vae-ema-cfg-1.5-guide-b.1.pth-seed-0",
            dict(ckpt="out/run7/checkpoint-last.pth", guide="b.1.pth", image_size=512),
        ),
        (
            "DiT-XL-2-pretrained-size-256-vae-ema-cfg-1.5-unipc-interval-0.125-0.7-channels-4-seed-0",
            dict(guidance_interval=(0.125, 0.7), guidance_channels=4, sampler="unipc"),
        ),
        (
            "SiT-XL-2-pretrained-size-256-vae-ema-cfg-1.0-euler-shift-0.3-seed-0",
            dict(model="SiT-XL/2", sampler="euler", timestep_shift=0.3),
        ),
        (
            "Large-DiT-3B-2-pretrained-size-256-vae-ema-cfg-4.0-seed-0",
            dict(model="Large-DiT-3B/2"),
        ),
    ],
)
def test_the_folder_has_upstreams_name(name, flags):
    opened = {name: value for name, value in flags.items() if name != "guide"}
    run = run_of(num_fid_samples=9, sample_dir="x", **opened)
    run = replace(run, settings=replace(run.settings, guide=flags.get("guide")))
    assert folder_of(run).as_posix() == f"x/{name}"


@pytest.mark.parametrize(
    "model, scale", [("DiT-Demo/2", 1.5), ("SiT-Demo/2", 1.0), ("Large-DiT-Demo/2", 4.0)]
)
def test_a_demo_keeps_its_size(model, scale):
    run = opened(Options(model=model, num_fid_samples=9, device="cpu"))
    assert (run.settings.image_size, run.settings.cfg_scale) == (128, scale)


FORMER = "DiT-XL-2-pretrained-size-512-vae-ema-cfg-4.0-seed-0"
AT_1_5 = "DiT-XL-2-pretrained-size-512-vae-ema-cfg-1.5-seed-0"
MINE = "DiT-XL-2-w-size-256-vae-ema-cfg-4.0-seed-0"


@pytest.mark.parametrize(
    "there, flags, line",
    [
        ([FORMER], {}, f"{FORMER}: was made with other defaults; to continue it: "
         "--image-size 512 --cfg-scale 4.0"),
        ([AT_1_5], dict(cfg_scale=1.5), f"{AT_1_5}: was made with other defaults; to continue "
         "it: --image-size 512"),
        ([MINE], dict(ckpt="w.pt"), f"{MINE}: was made with other defaults; to continue it: "
         "--cfg-scale 4.0"),
        ([FORMER, "DiT-XL-2-pretrained-size-256-vae-ema-cfg-1.5-seed-0"], {}, None),
        ([FORMER], dict(image_size=512, cfg_scale=4.0), None),
        ([FORMER], dict(seed=1), None),
        (["Large-DiT-3B-2-pretrained-size-256-vae-ema-cfg-4.0-seed-0"],
         dict(model="Large-DiT-3B/2"), None),
    ],
)  # fmt: skip
def test_a_folder_of_the_former_defaults_is_named(there, flags, line, tmp_path, capsys):
    for name in there:
        (tmp_path / name).mkdir()
    warn_of_legacy_folder(run_of(num_fid_samples=9, sample_dir=str(tmp_path), **flags))
    assert capsys.readouterr().out == (f"{tmp_path}/{line}\n" if line else "")


@pytest.mark.parametrize(
    "seed, world, fits",
    [
        (2**63 - 1, 2, True),
        (2**63, 2, False),
        (2**64 - 1, 1, True),
        (-(2**63), 1, True),
        (-(2**62), 2, True),
        (-(2**62) - 1, 2, False),
        (2**62 - 1, 4, True),
        (2**62, 4, False),
    ],
)
def test_the_last_ranks_seed_has_to_fit_into_64_bits(seed, world, fits):
    options = Options(seed=seed, num_fid_samples=9)
    require_seeds(options.changed(world_independent_noise=True), world)
    if fits:
        require_seeds(options, world)
        torch.Generator().manual_seed(seed * world + world - 1)
        return
    with mistake("seed", f"{world} ranks"):
        require_seeds(options, world)


USUAL = dict(model="DiT-Demo/2", sampler="ddim", num_sampling_steps=10, num_fid_samples=9)
CHANGES = {
    "num_classes": 7,
    "image_size": 64,
    "cfg_scale": 2.0,
    "num_sampling_steps": 9,
    "seed": 8,
    "sampler": "ddpm",
    "eta": 0.5,
    "per_proc_batch_size": 3,
    "num_fid_samples": 11,
    "balanced_labels": True,
    "world_independent_noise": True,
    "guidance_interval": (0.0, 0.7),
    "guidance_channels": 4,
}
OTHER_FAMILIES = {
    "SiT-Demo/2": {"timestep_shift": 0.3},
    "JiT-B/16": {"noise_scale": 2.0, "t_eps": 0.1},
}
RECORDED = {
    "--model",
    "--image-size",
    "--cfg-scale",
    "--num-sampling-steps",
    "--sampler",
    "--eta",
    "--global-seed",
    "--num-classes",
    "--precision",
    "--vae-precision",
    "--num-fid-samples",
    "--world-independent-noise",
    "--balanced-labels",
    "--per-proc-batch-size",
    "--ckpt (contents)",
    "--vae (contents)",
    "device",
    "torch",
    "scale and shift of latents",
    "this code's kernels",
    "number of threads",
    "number of ranks",
}


def recorded(world=1, tier="fp32", vae_precision="fp32", digest="a", space=None, **changes):
    """Return the record of a job with these weights, of its run and on so many ranks."""
    run = run_of(tensors=SimpleNamespace(digest=lambda: digest), **USUAL | changes)
    run = replace(run, space=space or run.space)
    decoder = SimpleNamespace(load=lambda: SimpleNamespace(precision=vae_precision))
    pipeline = SimpleNamespace(device=torch.device("cpu"), tier=tier, decoder=decoder)
    return record_of(run, pipeline, world)


def test_whatever_decides_a_pictures_bits_is_a_setting(monkeypatch):
    """A job that is resumed with another one is refused. What comes to a value is
    recorded as that value.

    The names stay, or no job that an earlier version began is resumed.
    """
    monkeypatch.setattr(fid_job, "digest", lambda space: "of the VAE")
    before = recorded()
    assert {*before} == RECORDED and recorded() == before
    assert before["--vae (contents)"] == "of the VAE"
    others = dict(world=2, tier="tf32", vae_precision="fp16", digest="b")
    others["space"] = LatentSpace(shift=1.0)
    for name, value in {**CHANGES, **others}.items():
        assert recorded(**{name: value}) != before, name
    for name in ("vae", "latent_stats", "sample_dir"):
        assert recorded(**{name: "elsewhere"}) == before, name
    for model, changes in OTHER_FAMILIES.items():
        usual = recorded(model=model, sampler="heun")
        for name, value in changes.items():
            assert recorded(model=model, sampler="heun", **{name: value}) != usual, name
