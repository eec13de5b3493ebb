"""REPA: Yu et al., 2024, arXiv:2410.06940. SiT's network, aligned to an encoder's
features in training, with time reversed.

Guidance follows REPA's recipe: scale 1.8 on all four channels at noise levels up to 0.7.
"""

from accel.families import Argument, Defaults, Family, sit
from accel.families.dit import SIZES

PROJECTORS = "projectors."  # training compares their outputs with an encoder's features
RECIPE = Defaults(image_size=256, cfg_scale=1.8, guidance_channels=4, guidance_interval=(0.0, 0.7))

WEIGHTS_SAY = "the weights say it; drop it"
EVALUATE = "python -m scripts.fid compares pictures with a reference; drop it"
# Flags of its own sampling scripts → what to use here.
SCRIPT_FLAGS = {
    "mode": "use --sampler: sde, or euler or heun for an ode",
    "heun": "use --sampler heun",
    "no-heun": "use --sampler euler",
    "num-steps": "use --num-sampling-steps",
    "guidance-low": "use --guidance-interval LOW HIGH",
    "guidance-high": "use --guidance-interval LOW HIGH",
    "resolution": "use --image-size",
    "encoder-depth": WEIGHTS_SAY,
    "projector-embed-dims": WEIGHTS_SAY,
    "qk-norm": WEIGHTS_SAY,
    "no-qk-norm": WEIGHTS_SAY,
    "legacy": WEIGHTS_SAY,
    "fused-attn": "--precision chooses the kernels; drop it",
    "no-fused-attn": "--precision chooses the kernels; drop it",
    "compute-metrics": EVALUATE,
    "fid-statistics": EVALUATE,
    "fid-statistics-file": EVALUATE,
    "fid-reference-file": EVALUATE,
}

FAMILY = Family(
    name="REPA",
    models={f"REPA-SiT-{size}": RECIPE for size in SIZES},
    prediction="velocity",
    samplers=sit.FAMILY.samplers,
    keys=sit.FAMILY.keys,
    code=__name__,
    fast=sit.FAMILY.fast,
    marks=(PROJECTORS,),
    # written in small letters
    arguments=(
        Argument("enc_type"),
        Argument("path_type", "[a-z].*"),
        Argument("prediction", "v", beside="path_type"),
    ),
    names_in_training={f"REPA-SiT-{size}": f"SiT-{size}" for size in SIZES},
    script_flags=SCRIPT_FLAGS,
)
