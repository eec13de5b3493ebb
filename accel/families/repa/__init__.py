"""REPA: Yu et al., 2024, arXiv:2410.06940. SiT's network, aligned to an encoder's
features in training, with time reversed.

Guidance follows REPA's recipe: scale 1.8 on all four channels at noise levels up to 0.7.
"""

from accel.families import Defaults, Family, sit
from accel.families.dit import SIZES

RECIPE = Defaults(image_size=256, cfg_scale=1.8, guidance_channels=4, guidance_interval=(0.0, 0.7))

FAMILY = Family(
    name="REPA",
    models={f"REPA-SiT-{size}": RECIPE for size in SIZES},
    prediction="velocity",
    samplers=sit.FAMILY.samplers,
    keys=sit.FAMILY.keys,
    code=__name__,
    fast=sit.FAMILY.fast,
)
