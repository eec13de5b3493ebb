"""What upstream's scripts import: `from download import find_model`. Run as a command, it fetches the published
weights."""

from accel.weights.checkpoint import download_model, fetch_published, find_model, pretrained_models

__all__ = ["download_model", "find_model", "pretrained_models"]

if __name__ == "__main__":
    fetch_published()
