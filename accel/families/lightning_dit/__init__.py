"""LightningDiT: Yao et al., 2025, arXiv:2501.01423. DiT with RMSNorm, SwiGLU and
rotation, a flow on VA-VAE's latents.

Guidance follows the published files' recipe: at noise levels up to 0.875, on the first
three of 32 channels.
"""

from accel.families import LOCAL_DIR, Defaults, Family, dit

RECIPE = Defaults(
    image_size=256,
    factor=16,
    vae="hustvl/vavae-imagenet256-f16d32-dinov2",
    cfg_scale=6.7,
    guidance_interval=(0.0, 0.875),
    num_sampling_steps=249,
    timestep_shift=0.3,
)
SIZES = "XL/1", "XL/2", "L/2", "B/1", "B/2", "1p0B/1", "1p0B/2", "1p6B/1", "1p6B/2"

FAMILY = Family(
    name="LightningDiT",
    models={f"LightningDiT-{size}": RECIPE for size in SIZES},
    prediction="velocity",
    samplers=("euler", "heun"),
    keys=(*dit.FAMILY.keys, "blocks.0.mlp.w12.weight"),
    class_name="LightningDiT",
    code=__name__,
    fast=f"{__name__}.fast",
    interval_rule="float32 times",
    fetch=f"hf download hustvl/lightningdit-xl-imagenet256-800ep {LOCAL_DIR}",
)
