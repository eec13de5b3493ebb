"""Upstream's module: `from download import find_model`. As a command, it downloads the published
weights.
"""

from accel import launch

if __name__ == "__main__":
    launch.begin()

from accel.checkpoints.loading import (
    download_model,
    fetch_published,
    find_model,
    pretrained_models,
)

__all__ = ["download_model", "find_model", "pretrained_models"]

if __name__ == "__main__":
    from accel.cli import OneLineParser

    OneLineParser(
        prog="download.py", description="Fetch the published weights that are missing here."
    ).parse_args()
    fetch_published()
