"""From a command's options to an order, and the settings that are recorded with it."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from networks import filled, opened_for

from accel.config import Config, FidJob
from accel.errors import UsageError
from accel.fid import job as fid_job
from accel.fid.job import folder_of, record_of, require_seeds
from accel.latents import LatentSpace


def job_of(**options):
    return FidJob.of(**{"num_fid_samples": 9, **options})


@pytest.mark.parametrize(
    "name, flags",
    [
        ("DiT-XL-2-pretrained-size-512-vae-ema-cfg-4.0-seed-0", {}),
        (
            "DiT-B-4-b-size-256-vae-d-cfg-1.5-seed-3",
            dict(model="DiT-B/4", ckpt="a/b.pt", vae="c/d", image_size=256, cfg_scale=1.5, seed=3)
            | dict(
                sampler="ddpm", guidance_interval=(0, 1), guidance_channels=3, timestep_shift=1.0
            ),
        ),
        (
            "DiT-XL-2-x_ep14-size-512-vae-ViTXL_n08-cfg-4.0-guide-model-seed-0",
            dict(model="DiT-XL/2", ckpt="DiTs/x_ep14/stage2_model.pt")
            | dict(vae="ViTXL_n08/model.pt", guide="model.pt"),
        ),
        (
            "DiT-XL-2-run7-size-512-vae-ema-cfg-4.0-guide-b.1.pth-seed-0",
            dict(model="DiT-XL/2", ckpt="out/run7/checkpoint-last.pth", guide="b.1.pth"),
        ),
        (
            "DiT-XL-2-pretrained-size-512-vae-ema-cfg-4.0-unipc-interval-0.125-0.7-channels-4-seed-0",
            dict(guidance_interval=(0.125, 0.7), guidance_channels=4, sampler="unipc"),
        ),
        (
            "SiT-XL-2-pretrained-size-256-vae-ema-cfg-4.0-euler-shift-0.3-seed-0",
            dict(model="SiT-XL/2", sampler="euler", timestep_shift=0.3),
        ),
        ("DiT-Demo-2-pretrained-size-128-vae-pretrained-cfg-4.0-seed-0", dict(model="DiT-Demo/2")),
    ],
)
def test_the_folder_has_upstreams_name(name, flags):
    assert folder_of(filled(job_of(sample_dir="x", **flags))).as_posix() == f"x/{name}"


@pytest.mark.parametrize(
    "seed, world, fits",
    [
        (2**63 - 1, 2, True),
        (2**63, 2, False),
        (2**64 - 1, 1, True),
        (2**64, 1, False),
        (-(2**63), 1, True),
        (-(2**63) - 1, 1, False),
        (-(2**62), 2, True),
        (-(2**62) - 1, 2, False),
        (2**62 - 1, 4, True),
        (2**62, 4, False),
    ],
)
def test_the_last_ranks_seed_has_to_fit_into_64_bits(seed, world, fits):
    job = SimpleNamespace(config=SimpleNamespace(seed=seed), world_independent_noise=False)
    if fits:
        require_seeds(job, world)
        torch.Generator().manual_seed(seed * world + world - 1)
        return
    with pytest.raises(UsageError, match=f"^seed={seed}: times {world} ranks"):
        require_seeds(job, world)


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
    "timestep_shift": 0.3,
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


def test_whatever_decides_a_pictures_bits_is_a_setting(monkeypatch):
    """A job that is resumed with another one is refused. What comes to a value is
    recorded as that value.

    The names stay, or no job that an earlier version began is resumed.
    """
    monkeypatch.setattr(fid_job, "digest", lambda space: "of the VAE")

    def recorded(
        world=1, precision="fp32", vae_precision="fp32", digest="a", space=None, **changes
    ):
        weights = SimpleNamespace(digest=lambda: digest)
        usual = job_of(model="DiT-Demo/2", eta=0.25, sampler="ddim", num_sampling_steps=10)
        opened = opened_for(usual, weights)
        of_config = {item.name for item in fields(Config)} & changes.keys()
        config = replace(opened.config, **{name: changes.pop(name) for name in of_config})
        opened = opened._replace(space=space or opened.space)
        decoder = SimpleNamespace(load=lambda: SimpleNamespace(precision=vae_precision))
        pipeline = SimpleNamespace(device=torch.device("cpu"), tier=precision, decoder=decoder)
        return record_of(replace(usual, config=config, **changes), opened, pipeline, world)

    before = recorded()
    assert (
        set(before) == RECORDED
        and recorded() == before
        and before["--vae (contents)"] == "of the VAE"
    )
    others = dict(world=2, precision="tf32", vae_precision="fp16", digest="b")
    others["space"] = LatentSpace(shift=1.0)
    for name, value in {**CHANGES, **others}.items():
        assert recorded(**{name: value}) != before, name
    for name in ("vae", "device", "sample_dir"):
        assert recorded(**{name: "elsewhere"}) == before, name
