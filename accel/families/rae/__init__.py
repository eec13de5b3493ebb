"""RAE: Zheng et al., 2025, "Diffusion Transformers with Representation Autoencoders",
arXiv:2510.11690. A flow on the features of an image encoder. A trunk of LightningDiT's blocks
modulates a wide head token by token (DDT, Wang et al. 2025, arXiv:2504.05741).

Guidance acts on all channels. The shift of the times follows from the size of the latents.
"""

from math import sqrt

from accel.families import FOLDER, LOCAL_DIR, Defaults, Family, dit

DECODERS = FOLDER / "decoders/dinov2/wReg_base"
STATISTICS = FOLDER / "stats/dinov2/wReg_base"
DECODER_256 = str(DECODERS / "ViTXL_n08/model.pt")
DECODER_512 = str(DECODERS / "ViTXL_n08_i512/model.pt")
RECIPE = Defaults(
    image_size=256,
    factor=16,
    vae=DECODER_256,
    cfg_scale=1.0,
    num_sampling_steps=49,
)
# Side of latents → decoder and statistics of the latents.
BY_SIDE = {
    16: (DECODER_256, str(STATISTICS / "imagenet1k/stat.pt")),
    32: (DECODER_512, str(STATISTICS / "imagenet1k_512/stat.pt")),
}
UNSHIFTED_SIZE = 4096  # numbers of a latent whose times are not shifted


def defaults_for(defaults: Defaults, channels: int, side: int | None) -> Defaults:
    """Guide all channels, and shift times by the latents' size. The original shifts times from data
    to noise by σ = √(numbers in a latent / 4096), which is a shift by 1/σ here.
    """
    defaults = defaults._replace(guidance_channels=channels)
    if side is None:
        return defaults
    vae, statistics = BY_SIDE.get(side, (defaults.vae, None))
    sigma = sqrt(channels * side**2 / UNSHIFTED_SIZE)
    return defaults._replace(vae=vae, latent_stats=statistics, timestep_shift=1 / sigma)


SIZES = "XL", "L", "B", "S"

FAMILY = Family(
    name="RAE",
    models={f"DiTDH-{size}/1": RECIPE for size in SIZES},
    prediction="velocity",
    samplers=("euler", "heun"),
    keys=(*dit.FAMILY.keys, "s_embedder.proj.weight", "t_embedder.W"),
    code=__name__,
    fast=f"{__name__}.fast",
    fetch="hf download nyu-visionx/RAE-collections --include 'DiTs/Dinov2/*' "
    f"--include 'decoders/dinov2/wReg_base/ViTXL*' --include 'stats/dinov2/*' {LOCAL_DIR}",
    names_in_training={f"DiTDH-{size}/1": f"DiTDH-{size}" for size in SIZES},
    any_size=False,
    last_time=0.999,
    defaults_for=defaults_for,
    interval_rule="float32 levels",
    label_orders=("random", "permuted"),
    config_reader=f"{__name__}.config_file",
)
