"""REPA: Yu et al., 2024, arXiv:2410.06940. SiT's network, aligned to an encoder's
features in training, with time reversed.

Guidance follows REPA's recipe: scale 1.8 on all channels at noise levels up to 0.7.
"""

from accel.families import Defaults, Family, all_channels, sit
from accel.families.dit import SIZES

PROJECTORS = "projectors."  # training compares their outputs with an encoder's features
RECIPE = Defaults(image_size=256, cfg_scale=1.8, guidance_channels=4, guidance_interval=(0.0, 0.7))

FAMILY = Family(
    name="REPA",
    models={f"REPA-SiT-{size}": RECIPE for size in SIZES},
    prediction="velocity",
    samplers=sit.FAMILY.samplers,
    keys=sit.FAMILY.keys,
    class_name="SiT",
    attributes=("path_type", "projectors", "z_dims", "encoder_depth"),
    code=__name__,
    fast=sit.FAMILY.fast,
    marks=(PROJECTORS,),
    arguments={"enc_type": (), "path_type": ("linear", "cosine")},
    defaults_for=all_channels,
    names_in_training={f"REPA-SiT-{size}": f"SiT-{size}" for size in SIZES},
)
