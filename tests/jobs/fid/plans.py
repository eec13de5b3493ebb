"""A plan of the demo model's pictures."""

from pathlib import Path

from accel.jobs.fid.folder import Plan


def plan(**more):
    """`Plan` with what a test leaves open."""
    small = dict(
        folder=Path("pictures"), count=12, batch_size=2, seed=3, num_classes=8, image_size=128
    )
    return Plan(**{**small, "latent": (4, 16, 16), **more})
