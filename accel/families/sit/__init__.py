"""SiT: Ma et al., 2024, arXiv:2401.08740. DiT's network, trained as a flow."""

from accel.families import Argument, Defaults, Family, dit
from accel.families.dit import SIZES, demo

WEIGHTS_SAY = "the weights say it; drop it"
FIXED = "euler and heun take --num-sampling-steps even steps; drop it"
SDE = "sde computes SiT's default, form sigma and a last step of 0.04; drop it"
# Flags of its own sampling scripts → what to use here.
SCRIPT_FLAGS = {
    "ODE": "use --sampler euler or --sampler heun",
    "SDE": "use --sampler sde",
    "path-type": f"only the linear path is sampled, and {WEIGHTS_SAY}",
    "prediction": f"--model names the family, else {WEIGHTS_SAY}",
    "loss-weight": "is for training; drop it",
    "train-eps": "is for training; drop it",
    "sample-eps": "is 0 for the linear path; drop it",
    "sampling-method": "use --sampler: euler, heun or sde",
    "atol": FIXED,
    "rtol": FIXED,
    "reverse": "only sampling is computed, not its reverse; drop it",
    "likelihood": "only sampling is computed, no likelihood; drop it",
    "diffusion-form": SDE,
    "diffusion-norm": SDE,
    "last-step": SDE,
    "last-step-size": SDE,
}

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
    fetch="hf download nyu-visionx/SiT-collections --local-dir pretrained_models",
    script_flags=SCRIPT_FLAGS,
)
