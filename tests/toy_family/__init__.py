"""Toy: a network of three layers for latents of three channels, four pixels to a value."""

from pathlib import Path

from accel.families import Defaults, Family

FOLDER = Path(__file__).parent
FAMILY = Family(
    name="Toy",
    models={
        "Toy/2": Defaults(
            image_size=24,
            num_classes=5,
            factor=4,
            ckpt=str(FOLDER / "toy.safetensors"),
            vae=str(FOLDER / "vae"),
        )
    },
    prediction="noise",
    samplers=("ddpm", "ddim"),
    keys=("places.weight", "blocks.2.qkv.weight"),
    code=__name__,
    config_reader=f"{__name__}.config_file",
    label_orders=("random", "permuted"),
)
