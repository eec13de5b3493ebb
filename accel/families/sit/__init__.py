"""SiT: Ma et al., 2024, arXiv:2401.08740. DiT's network, trained as a flow."""

from accel.families import DEMO, LOCAL_DIR, Defaults, Family, dit
from accel.families.dit import SIZES

FAMILY = Family(
    name="SiT",
    models={
        **{f"SiT-{size}": Defaults(image_size=256) for size in SIZES},
        "SiT-Demo/2": dit.DEMO_MODEL._replace(ckpt=str(DEMO / "sit.safetensors")),
    },
    prediction="velocity",
    samplers=("sde", "euler", "heun"),
    keys=dit.FAMILY.keys,
    class_name="SiT",
    attributes=("learn_sigma",),
    code=__name__,
    fast=f"{__name__}.fast",
    arguments={"path_type": ("Linear", "GVP", "VP")},
    files={"SiT-XL-2-256x256.pt": "SiT-XL/2"},
    fid_defaults=dict(image_size=256, cfg_scale=1.0),
    fetch=f"hf download nyu-visionx/SiT-collections {LOCAL_DIR}",
)
