"""Names, pictures and batches of an FID job."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from accel import fid
from accel.errors import UsageError
from accel.fid import folder as folder_module
from accel.fid.folder import Batches, folder_of, picture_name, read_picture, settings_of, write_picture
from accel.options import DistributedOptions


def options(**more):
    return DistributedOptions(**{"num_fid_samples": 9, **more}).resolve()


@pytest.mark.parametrize(
    "flags, name",
    [
        ({}, "DiT-XL-2-pretrained-size-512-vae-ema-cfg-4.0-seed-0"),
        (
            {"ckpt": "a/b.pt", "vae": "c/d", "image_size": 256, "cfg_scale": 1.5, "seed": 3, "model": "DiT-B/4"},
            "DiT-B-4-b-size-256-vae-d-cfg-1.5-seed-3",
        ),
        ({"model": "DiT-Demo/2"}, "DiT-Demo-2-pretrained-size-128-vae-pretrained-cfg-4.0-seed-0"),
    ],
)
def test_the_folder_has_upstreams_name(flags, name):
    assert folder_of(options(sample_dir="x", **flags)).as_posix() == f"x/{name}"


@pytest.mark.parametrize(
    "wanted, n, world, independent",
    [(7, 3, 2, False), (50, 4, 3, False), (1, 8, 4, False), (7, 3, 2, True), (22, 2, 5, True), (3, 8, 4, True)],
)
def test_batches_cover_every_picture_once(wanted, n, world, independent):
    chosen = options(num_fid_samples=wanted, per_proc_batch_size=n, world_independent_noise=independent)
    ranks = [Batches(chosen, rank, world) for rank in range(world)]
    made = sorted(number for rank in ranks for batch in rank.left(set()) for number in rank.pictures(batch))
    assert made == list(range(ranks[0].total))
    assert ranks[0].total == (wanted if independent else -(-wanted // (n * world)) * n * world)
    done = {0, 2}
    assert {batch for rank in ranks for batch in rank.left(done)} == set(range(ranks[0].count)) - done


def test_a_picture_is_read_as_it_was_written_or_not_at_all(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    paths = [tmp_path / picture_name(number) for number in (0, 1)]
    own, other = (write_picture(path, pixels // (number + 1)) for number, path in enumerate(paths))
    assert own != other and np.array_equal(read_picture(paths[0], {own}), pixels)
    assert np.array_equal(read_picture(paths[0], {other, own}), pixels)
    whole = paths[0].read_bytes()
    for content in (paths[1].read_bytes(), whole[:-20], b"", whole + b"\0"):
        paths[0].write_bytes(content)
        with pytest.raises(UsageError, match="000000.png: is unreadable or was changed; delete it and start again"):
            read_picture(paths[0], {own})
    paths[0].unlink()
    with pytest.raises(UsageError, match="000000.png: is unreadable or was changed"):
        read_picture(paths[0], {own})


def test_a_ranks_seed_fits_into_64_bits(tmp_path):
    chosen = options(seed=10**19, sample_dir=str(tmp_path))
    fid.check(chosen, 1)
    with pytest.raises(UsageError, match="--global-seed 10000000000000000000: times 2 ranks"):
        fid.check(chosen, 2)
    chosen.world_independent_noise = True
    fid.check(chosen, 2)


def test_guidance_doubles_the_rows_that_a_rank_evaluates(tmp_path):
    assert fid.batch_of(options(per_proc_batch_size=6)) == (6, 2)
    assert fid.batch_of(options(per_proc_batch_size=6, cfg_scale=1.0)) == (6, 1)
    assert fid.batch_of(options(per_proc_batch_size=32)) == (32, 2)  # upstream makes whole batches
    assert fid.batch_of(options(per_proc_batch_size=32, world_independent_noise=True)) == (9, 2)


def test_the_autotuner_goes_by_the_jobs_own_choices_first(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own, cache = fid.tuner_folders(options(sample_dir=str(tmp_path)))
    assert own == folder_of(options(sample_dir=str(tmp_path))) / ".job" and cache == tmp_path / "dit"


@pytest.mark.parametrize("seed, world, fits", [
    (2**63 - 1, 2, True), (2**63, 2, False), (2**64 - 1, 1, True), (2**64, 1, False), (-(2**63), 1, True),
    (-(2**63) - 1, 1, False), (-(2**62), 2, True), (-(2**62) - 1, 2, False), (2**62 - 1, 4, True), (2**62, 4, False),
])  # fmt: skip
def test_the_last_ranks_seed_is_the_one_that_has_to_fit(seed, world, fits):
    chosen = options(seed=0)
    chosen.seed = seed
    if fits:
        fid.check(chosen, world)
        torch.Generator().manual_seed(seed * world + world - 1)
    else:
        with pytest.raises(UsageError, match=f"--global-seed {seed}: times {world} ranks"):
            fid.check(chosen, world)


CHANGES = {
    "num_classes": 7, "image_size": 64, "cfg_scale": 2.0, "num_sampling_steps": 9, "seed": 8, "sampler": "ddim",
    "eta": 0.5, "per_proc_batch_size": 3, "num_fid_samples": 11, "balanced_labels": True,
    "world_independent_noise": True,
}  # fmt: skip


def test_whatever_decides_a_pictures_bits_is_a_setting(monkeypatch):
    """A job that is resumed with another one is refused. What comes to a value is recorded as that value."""
    monkeypatch.setattr(folder_module.vae, "digest", lambda folder: "of the VAE")

    def settings(world=1, precision="fp32", vae_precision="fp32", digest="a", plan=None, **changes):
        chosen = options(model="DiT-Demo/2", eta=0.25, sampler="ddim", num_sampling_steps=10)
        for name, value in changes.items():
            setattr(chosen, name, value)
        engine = SimpleNamespace(
            options=chosen, device=torch.device("cpu"), precision=precision, vae_folder="v", plan=plan,
            checkpoint=SimpleNamespace(digest=lambda: digest),
            load_decoder=lambda: SimpleNamespace(precision=vae_precision),
        )  # fmt: skip
        return settings_of(engine, Batches(chosen, 0, world))

    before = settings()
    assert settings() == before and before["--vae (contents)"] == "of the VAE"
    for name, value in {**CHANGES, "sampler": "ddpm"}.items():
        assert settings(**{name: value}) != before, name
    plan = SimpleNamespace(setting="plan of 3")
    for change in (
        dict(world=2),
        dict(precision="tf32"),
        dict(vae_precision="fp16"),
        dict(digest="b"),
        dict(plan=plan),
    ):
        assert settings(**change) != before, change
    for name in ("ckpt", "vae", "device", "sample_dir"):
        assert settings(**{name: "elsewhere"}) == before, name
