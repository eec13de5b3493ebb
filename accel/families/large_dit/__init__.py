"""Large-DiT: Alpha-VLLM, 2024. A DiT with LLaMA's blocks."""

from accel.families import Defaults, Family, dit

FAMILY = Family(
    name="Large-DiT",
    models={
        **{f"Large-DiT-{size}/2": Defaults(image_size=256) for size in ("600M", "3B", "7B")},
        "Large-DiT-Demo/2": dit.demo("large-dit.safetensors"),
    },
    prediction="noise",
    samplers=dit.FAMILY.samplers,
    keys=("x_embedder.weight", "layers.0.attention.wq.weight"),
    code=__name__,
    fast=f"{__name__}.fast",
)
