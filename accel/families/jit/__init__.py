"""JiT: Li & He, 2025, "Back to Basics", arXiv:2511.13720. LightningDiT's block on pixels. The
network sees the label also as tokens, and estimates the clean picture.

Guidance follows the published recipe: all channels, at times above 0.1.
"""

from accel.families import Defaults, Family

BASE_SIDE = 256  # px, of pictures whose first noise has scale 1
RECIPE = Defaults(factor=1, vae="pixels", guidance_interval=(0.0, 0.9), num_sampling_steps=50)
# The scale of guidance, by size and patch. Patches of 16 are for 256 px, of 32 for 512.
SCALES = {"B/16": 3.0, "B/32": 3.0, "L/16": 2.4, "L/32": 2.5, "H/16": 2.2, "H/32": 2.3}


def scale_noise(defaults: Defaults, channels: int, side: int | None) -> Defaults:
    """Scale the first noise by the side: published networks were trained with scale 1 at 256 px and
    2 at 512 px.
    """
    return defaults._replace(noise_scale=max(1.0, (side or BASE_SIDE) / BASE_SIDE))


FAMILY = Family(
    name="JiT",
    models={
        f"JiT-{size}": RECIPE._replace(image_size=16 * int(size[2:]), cfg_scale=scale)
        for size, scale in SCALES.items()
    },
    prediction="data",
    samplers=("heun", "euler"),
    keys=(
        "x_embedder.proj1.weight",
        "x_embedder.proj2.weight",
        "in_context_posemb",
        "t_embedder.mlp.0.weight",
        "y_embedder.embedding_table.weight",
        "blocks.0.mlp.w12.weight",
        "final_layer.linear.weight",
    ),
    code=__name__,
    fast=f"{__name__}.fast",
    interval_rule="float32 times, no ends",
    heun_by_start=False,
    label_orders=("class_by_class", "class_by_class"),
    any_size=False,
    defaults_for=scale_noise,
)
