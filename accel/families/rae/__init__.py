"""RAE: Zheng et al., 2025, "Diffusion Transformers with Representation Autoencoders",
arXiv:2510.11690. A flow on the features of an image encoder: a trunk of LightningDiT's blocks, and
a wide head (DDT, Wang et al. 2025, arXiv:2504.05741) that it modulates token by token.

Guidance acts on all channels. The shift of the times follows from the size of the latents.
"""

from accel.families import Defaults, Family, all_channels, dit
from accel.files import weights_folder

FOLDER = weights_folder()
DECODERS = FOLDER / "decoders/dinov2/wReg_base"
STATISTICS = FOLDER / "stats/dinov2/wReg_base"
OF_256 = str(DECODERS / "ViTXL_n08/model.pt")
OF_512 = str(DECODERS / "ViTXL_n08_i512/model.pt")
RECIPE = Defaults(
    image_size=256,
    factor=16,
    vae=OF_256,
    cfg_scale=1.0,
    num_sampling_steps=49,
    decoders={
        16: (OF_256, str(STATISTICS / "imagenet1k/stat.pt")),
        32: (OF_512, str(STATISTICS / "imagenet1k_512/stat.pt")),
    },
)
SIZES = "XL", "L", "B", "S"

FAMILY = Family(
    name="RAE",
    models={f"DiTDH-{size}/1": RECIPE for size in SIZES},
    prediction="velocity",
    samplers=("euler", "heun"),
    keys=(*dit.FAMILY.keys, "s_embedder.proj.weight", "t_embedder.W"),
    code=__name__,
    fast=f"{__name__}.fast",
    fetch="hf download nyu-visionx/RAE-collections --local-dir pretrained_models "
    "--include 'DiTs/Dinov2/*' --include 'decoders/dinov2/wReg_base/ViTXL*' "
    "--include 'stats/dinov2/*'",
    names_in_training={f"DiTDH-{size}/1": f"DiTDH-{size}" for size in SIZES},
    any_size=False,
    last_time=0.999,
    of_latents=all_channels,
    compared="float32 levels",
    label_orders=("random", "permuted"),
    config_reader=f"{__name__}.config_file",
)
