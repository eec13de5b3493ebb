"""Large-DiT: Alpha-VLLM, 2024. A DiT with LLaMA's blocks."""

from accel.families import DEMO, Defaults, Family, dit

SIZES = "600M", "3B", "7B"

FAMILY = Family(
    name="Large-DiT",
    models={
        **{f"Large-DiT-{size}/2": Defaults(image_size=256) for size in SIZES},
        "Large-DiT-Demo/2": dit.DEMO_MODEL._replace(ckpt=str(DEMO / "large-dit.safetensors")),
    },
    prediction="noise",
    samplers=dit.FAMILY.samplers,
    keys=("x_embedder.weight", "layers.0.attention.wq.weight"),
    code=__name__,
    fast=f"{__name__}.fast",
    names_in_training={
        f"Large-DiT-{size}/2": f"DiT_Llama_{size}_patch2" for size in (*SIZES, "Demo")
    },
)
