"""DiT: Peebles & Xie, 2023, arXiv:2212.09748. network.py is a link to models.py."""

from itertools import product

from accel.families import DEMO, Defaults, Family

PUBLISHED = {256: "DiT-XL-2-256x256.pt", 512: "DiT-XL-2-512x512.pt"}
SIZES = tuple(map("/".join, product(("XL", "L", "B", "S"), "248")))
KEYS = ("x_embedder.proj.weight", "blocks.0.attn.qkv.weight")
DEMO_MODEL = Defaults(
    image_size=128,
    num_classes=8,
    vae=str(DEMO / "vae"),
    ckpt=str(DEMO / "dit.safetensors"),
    class_names=("planet", "mountains", "flower", "ball", "block", "sea", "balloon", "mushroom"),
)

FAMILY = Family(
    name="DiT",
    models={
        **{f"DiT-{size}": Defaults() for size in SIZES},
        "DiT-XL/2": Defaults(published=PUBLISHED),
        "DiT-Demo/2": DEMO_MODEL,
    },
    prediction="noise",
    samplers=("ddpm", "ddim", "dpm++", "unipc"),
    keys=KEYS,
    class_name="DiT",
    diffusers_key="transformer_blocks.0.norm1.linear.weight",
    code=__name__,
    fast=f"{__name__}.fast",
    fid_defaults=dict(image_size=256, cfg_scale=1.5),
)
