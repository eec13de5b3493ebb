"""SiT: Ma et al., 2024, arXiv:2401.08740. DiT's network, trained as a flow."""

from accel.families import Argument, Defaults, Family, dit
from accel.families.dit import SIZES, demo

FAMILY = Family(
    name="SiT",
    models={
        **{f"SiT-{size}": Defaults(image_size=256) for size in SIZES},
        "SiT-Demo/2": demo("sit.safetensors"),
    },
    prediction="velocity",
    samplers=("sde", "euler", "heun"),
    keys=dit.FAMILY.keys,
    code=__name__,
    fast=f"{__name__}.fast",
    # written with a capital
    arguments=(
        Argument("path_type", "[A-Z].*"),
        Argument("prediction", "velocity|score|noise", beside="path_type"),
    ),
    fid_defaults=dict(image_size=256, cfg_scale=1.0),
    fetch="hf download nyu-visionx/SiT-collections --local-dir pretrained_models",
)
