"""REPA: Yu et al., 2024, arXiv:2410.06940. SiT's network, trained beside an encoder's features, with time reversed.

Guidance is that of REPA's recipe: all four channels, at noise levels up to 0.7, by 1.8.
"""

from accel.families import Defaults, Family, sit

RECIPE = Defaults(image_size=256, cfg_scale=1.8, guidance_channels=4, guidance_interval=(0.0, 0.7))

FAMILY = Family(
    name="REPA",
    models={f"REPA-SiT-{size}": RECIPE for size in sit.SIZES},
    prediction="velocity",
    samplers=sit.FAMILY.samplers,
    code=__name__,
)
