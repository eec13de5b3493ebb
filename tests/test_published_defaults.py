"""What each family's published models imply where a user says nothing, by source."""

import pytest

from accel.families import families, weights_folder
from accel.families.lightning_dit.weights import RECOMMENDED

HERE = weights_folder()

# Scale of guidance, channels of C, interval of noise levels, steps, sampler, pixels, noise's scale,
# shift of times, decoder, all but the first two as in the source.
TABLE = {
    # arXiv:2212.09748 and its sample.py; 512 px and the decoder as in the contest
    **{f"DiT-{size}/{patch}": (4.0, 3, (0, 1), 250, "ddpm", 512, 1, 1, "ema")
       for size in ("XL", "L", "B", "S") for patch in (2, 4, 8)},
    # arXiv:2401.08740 and its sample.py
    **{f"SiT-{size}/{patch}": (4.0, 3, (0, 1), 250, "sde", 256, 1, 1, "ema")
       for size in ("XL", "L", "B", "S") for patch in (2, 4, 8)},
    # arXiv:2410.06940, README: --cfg-scale 1.8 --guidance-high 0.7
    **{f"REPA-SiT-{size}/{patch}": (1.8, "C", (0, 0.7), 250, "sde", 256, 1, 1, "ema")
       for size in ("XL", "L", "B", "S") for patch in (2, 4, 8)},
    # LLaMA2-Accessory, Large-DiT-ImageNet: sample.py
    **{f"Large-DiT-{size}/2": (4.0, 3, (0, 1), 250, "ddpm", 256, 1, 1, "ema")
       for size in ("600M", "3B", "7B")},
    # arXiv:2501.01423, configs/reproductions/lightningdit_xl_vavae_f16d32_800ep_cfg.yaml
    **{f"LightningDiT-{size}": (6.7, 3, (0, 0.875), 249, "euler", 256, 1, 0.3,
                                "hustvl/vavae-imagenet256-f16d32-dinov2")
       for size in ("XL/1", "XL/2", "L/2", "B/1", "B/2", "1p0B/1", "1p0B/2", "1p6B/1", "1p6B/2")},
    # arXiv:2511.13720, README: --cfg, --interval_min 0.1, --num_sampling_steps 50, --noise_scale
    "JiT-B/16": (3.0, 3, (0, 0.9), 50, "heun", 256, 1, 1, "pixels"),
    "JiT-B/32": (3.0, 3, (0, 0.9), 50, "heun", 512, 2, 1, "pixels"),
    "JiT-L/16": (2.4, 3, (0, 0.9), 50, "heun", 256, 1, 1, "pixels"),
    "JiT-L/32": (2.5, 3, (0, 0.9), 50, "heun", 512, 2, 1, "pixels"),
    "JiT-H/16": (2.2, 3, (0, 0.9), 50, "heun", 256, 1, 1, "pixels"),
    "JiT-H/32": (2.3, 3, (0, 0.9), 50, "heun", 512, 2, 1, "pixels"),
    # arXiv:2510.11690, configs/stage2/sampling: 50 points, no guidance unless a file says it
    **{f"DiTDH-{size}/1": (1.0, "C", (0, 1), 49, "euler", 256, 1, "by size",
                           str(HERE / "decoders/dinov2/wReg_base/ViTXL_n08/model.pt"))
       for size in ("XL", "L", "B", "S")},
}  # fmt: skip
# The shipped demo models.
TABLE |= {
    name: (4.0, 3, (0, 1), 250, sampler, 128, 1, 1, str(HERE / "demo/vae"))
    for name, sampler in (
        ("DiT-Demo/2", "ddpm"),
        ("SiT-Demo/2", "sde"),
        ("Large-DiT-Demo/2", "ddpm"),
    )
}
MODELS = {name: family for family in families() for name in family.models}


@pytest.mark.parametrize("name", MODELS)
def test_a_models_defaults(name):
    family = MODELS[name]
    own = family.models[name]
    for channels in (3, 16, 1152):
        side = own.image_size // own.factor
        implied = family.defaults_for(own, channels, side) if family.defaults_for else own
        scale, guided, interval, steps, sampler, pixels, noise, shift, vae = TABLE[name]
        assert implied.guidance_channels == (channels if guided == "C" else guided)
        assert implied.guidance_interval == interval
        assert (implied.cfg_scale, implied.num_sampling_steps) == (scale, steps)
        assert (family.samplers[0], implied.image_size) == (sampler, pixels)
        if shift == "by size":  # arXiv:2510.11690, section 4.2: sqrt(numbers in a latent / 4096)
            shift = pytest.approx(64 / (channels**0.5 * side))
        assert (implied.noise_scale, implied.timestep_shift, implied.vae) == (noise, shift, vae)
        assert implied.t_eps == 0.05  # JiT's; other families have none


def test_published_files():
    dit = {256: "DiT-XL-2-256x256.pt", 512: "DiT-XL-2-512x512.pt"}
    for name, family in MODELS.items():
        assert family.models[name].published == (dit if name == "DiT-XL/2" else {})
    # configs/reproductions/lightningdit_xl_vavae_f16d32_64ep_cfg.yaml
    early = dict(cfg_scale=10.0, guidance_interval=(0.0, 0.9))
    assert {"lightningdit-xl-imagenet256-64ep": early} == RECOMMENDED
    statistics = HERE / "stats/dinov2/wReg_base"
    decoders = HERE / "decoders/dinov2/wReg_base"
    rae = MODELS["DiTDH-XL/1"]
    for side, decoder, stat in (
        (16, "ViTXL_n08/model.pt", "imagenet1k/stat.pt"),
        (32, "ViTXL_n08_i512/model.pt", "imagenet1k_512/stat.pt"),
    ):
        implied = rae.defaults_for(rae.models["DiTDH-XL/1"], 768, side)
        assert implied.vae == str(decoders / decoder)
        assert implied.latent_stats == str(statistics / stat)


@pytest.mark.parametrize("name", MODELS)
def test_a_familys_own_ways(name):
    """Prediction, labels and defaults of FID jobs, the last time, Heun's guidance."""
    family = MODELS[name]
    ways = (
        family.prediction,
        family.label_orders,
        family.last_time,
        family.heun_by_start,
        family.interval_rule,
        family.any_size,
        dict(family.fid_defaults),
    )
    usual = (("random", "by_number"), 1.0, True, "float64 levels", True)
    # sample_ddp.py of DiT and SiT
    dit = dict(image_size=256, cfg_scale=1.5)
    sit = dict(image_size=256, cfg_scale=1.0)
    by_class = ("class_by_class", "class_by_class")
    assert (
        ways
        == {
            "DiT": ("noise", *usual, dit),
            "Large-DiT": ("noise", *usual, {}),
            "SiT": ("velocity", *usual, sit),
            "REPA": ("velocity", *usual, {}),
            "LightningDiT": ("velocity", usual[0], 1.0, True, "float32 times", True, {}),
            "JiT": ("data", by_class, 1.0, False, "float32 times, no ends", False, {}),
            "RAE": ("velocity", ("random", "permuted"), 0.999, True, "float32 levels", False, {}),
        }[family.name]
    )
