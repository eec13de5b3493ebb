"""Check that the guide, the second network of autoguidance, matches the guided network."""

from collections.abc import Mapping
from typing import Any

from accel.checkpoints import Checkpoint
from accel.config.options import USER


def require_alike(
    values: Mapping[str, Any], origins: Mapping[str, str], guide: Checkpoint, checkpoint: Checkpoint
) -> list[str]:
    """Check that a guide matches the guided network `checkpoint` in family, classes, latents and
    noise. Return notices. values, origins: of options. Raises UsageError if they differ.
    """
    spec = checkpoint.spec
    other = guide.spec
    size = spec.recommended.get("image_size", spec.image_size)
    if origins.get("image_size") == USER and not spec.family.any_size:
        size = values["image_size"]
    compared = {
        "the family": (other.family.name, spec.family.name),
        "num_classes": (other.num_classes, spec.num_classes),
        "channels of latents": (other.in_channels, spec.in_channels),
        "channels of its output": (other.out_channels, spec.out_channels),
        "a side of trained latents": (other.latent_size, spec.latent_size),
        "image_size": (other.recommended.get("image_size", other.image_size), size),
        # Without a configuration, the latents belong to the family's decoder.
        "latent_scale": tuple(
            each.latent_settings.get("latent_scale", 1) for each in (other, spec)
        ),
        "latent_norm": tuple(
            each.latent_settings.get("latent_norm", True) for each in (other, spec)
        ),
    }
    if spec.family.prediction == "data" and origins["noise_scale"] != USER:
        compared["noise_scale"] = other.recommended.get("noise_scale"), values["noise_scale"]
    for fact, (value, guided) in compared.items():
        if None not in (value, guided) and value != guided:
            raise guide.given.error(
                f"has {fact} {value}, and {checkpoint.name} {guided}",
                "a guide has the family, classes, latents and noise of the network that it guides",
            )
    return [guide.given.notice(guide.family_notice)] if guide.family_notice else []
