"""RAE: Zheng et al., 2025, "Diffusion Transformers with Representation Autoencoders",
arXiv:2510.11690. A flow on the features of an image encoder: a trunk of LightningDiT's blocks, and
a wide head (DDT, Wang et al. 2025, arXiv:2504.05741) that it modulates token by token.

Guidance acts on all channels. The shift of the times follows from the size of the latents.
"""

from accel.families import Defaults, Family, dit
from accel.files import weights_folder

DECODER = weights_folder() / "decoders/dinov2/wReg_base/ViTXL_n08/model.pt"
RECIPE = Defaults(
    image_size=256,
    factor=16,
    vae=str(DECODER),
    cfg_scale=1.0,
    guidance_channels=768,
    num_sampling_steps=49,
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
    fetch="hf download nyu-visionx/RAE-collections --local-dir pretrained_models",
    names_in_training={f"DiTDH-{size}/1": f"DiTDH-{size}" for size in SIZES},
    script_flags={"label-sampling": "use --balanced-labels for equal; the default is random"},
    any_size=False,
    last_time=0.999,
    label_orders=("random", "permuted"),
    config_reader=f"{__name__}.config_file",
)
